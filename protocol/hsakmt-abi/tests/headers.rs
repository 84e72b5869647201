//! Every struct, field, bit-field, enum value and function of this crate against the installed C headers
//! (libhsakmt-dev). `VIRTIO_KFD_HEADER_DIRS=/a/usr/include:/b/usr/include` checks other ones.

#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::panic,
    reason = "test code, helpers included"
)]

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use hsakmt_abi::bits::CWord;
use hsakmt_abi::functions::{FUNCTIONS, by_name};
use hsakmt_abi::layout;
use hsakmt_abi::release::Releases;
use hsakmt_abi::{CONSTS, ENUMS, STRUCTS, WORDS};

#[path = "../../kfd-abi/tests/header_check/mod.rs"]
mod header_check;
use header_check::{HEADER_DIRS, Probe, check, compiler, const_probes, roots, struct_probes};

/// The macro that tells ROCm 6's header from ROCm 5's.
const ROCM_6_MACRO: &str = "HSA_SMI_EVENT_MSG_SIZE";

/// Typedefs that are no business of this crate: the library makes no use of them, or they are covered by another name.
const NOT_DESCRIBED: &[&str] = &[
    // A union of one struct, described as HsaDbgWaveMsgAMDGen2.
    "HsaDbgWaveMessageAMD",
    // An enum of one unused value.
    "HSA_DBG_NODE_CONTROL",
    // Values of these are described as constants and as HsaSvmFlags.
    "HsaEventTimeOut",
    "HSA_SVM_FLAGS",
];

/// Declared in the header and exported by no release.
const NOT_EXPORTED: &[&str] = &["hsaKmtReportQueue"];

fn word_probes(word: &CWord) -> Vec<Probe> {
    let mut probes = vec![Probe {
        what: format!("sizeof({})", word.name),
        since: vec![],
        macro_name: None,
        expression: format!("sizeof({})", word.name),
        expected: word.size as u64,
        bits: 64,
    }];
    probes.extend(word.fields.iter().map(|field| Probe {
        what: format!("bits of {}.{}", word.name, field.name),
        since: vec![field.since],
        macro_name: None,
        // The word with all bits of this field set.
        expression: format!(
            "({{ {c} v; unsigned long long w = 0; memset(&v, 0, sizeof v); v.{f} = -1; memcpy(&w, &v, sizeof v); w; }})",
            c = word.name,
            f = field.name
        ),
        expected: field.mask,
        bits: 64,
    }));
    probes
}

fn probes() -> Vec<Probe> {
    let mut probes = Vec::new();
    STRUCTS.iter().for_each(|structs| probes.extend(struct_probes(structs)));
    CONSTS.iter().for_each(|consts| probes.extend(const_probes(consts)));
    WORDS.iter().flat_map(|words| words.iter()).for_each(|word| probes.extend(word_probes(word)));
    for c_enum in ENUMS.iter().flat_map(|enums| enums.iter()) {
        probes.extend(struct_probes(&[c_enum.c_type]));
        let mut values = const_probes(c_enum.values);
        values.iter_mut().for_each(|probe| probe.since.push(c_enum.c_type.since));
        probes.extend(values);
    }
    probes
}

fn without_comments(text: &str) -> String {
    let mut code = String::new();
    let mut rest = text;
    while let Some((before, comment)) = rest.split_once("/*") {
        code.push_str(before);
        rest = comment.split_once("*/").map_or("", |(_, after)| after);
    }
    code.push_str(rest);
    let lines: Vec<&str> =
        code.lines().map(|line| line.split_once("//").map_or(line, |(code, _)| code)).collect();
    lines.join("\n")
}

/// Names of typedefs of structs, unions and enums.
fn typedefs(code: &str) -> BTreeSet<&str> {
    code.lines()
        .filter_map(|line| line.trim_end().strip_prefix('}').or_else(|| Some(line.trim_end())))
        .filter_map(|line| line.trim_start().strip_suffix(';'))
        .filter(|name| name.to_ascii_uppercase().starts_with("HSA"))
        .filter(|name| name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_'))
        .collect()
}

/// Number of arguments of each prototype.
fn prototypes(code: &str) -> BTreeMap<&str, usize> {
    code.split("hsaKmt")
        .skip(1)
        .filter_map(|rest| {
            let (name, rest) = rest.split_once('(')?;
            let (arguments, _) = rest.split_once(')')?;
            let count = match arguments.trim() {
                "" | "void" => 0,
                arguments => arguments.split(',').count(),
            };
            Some((name.trim(), count))
        })
        .collect()
}

fn function_differences(code: &str, release: Releases) -> Vec<String> {
    let mut differences = Vec::new();
    let prototypes = prototypes(code);
    for function in FUNCTIONS.iter().filter(|function| function.releases.contains(release)) {
        let short = function.name.strip_prefix("hsaKmt").unwrap();
        match prototypes.get(short) {
            None => differences.push(format!("{}: no prototype", function.name)),
            Some(&count) if count != usize::from(function.arguments) => {
                differences.push(format!(
                    "{}: C has {count} arguments, we have {}",
                    function.name, function.arguments
                ));
            }
            Some(_) => {}
        }
    }
    for short in prototypes.keys() {
        let name = format!("hsaKmt{short}");
        let known = by_name(&name).is_some_and(|function| function.releases.contains(release));
        if !known && !NOT_EXPORTED.contains(&name.as_str()) {
            differences.push(format!("{name}: not in our table for this release"));
        }
    }
    differences
}

fn type_differences(code: &str) -> Vec<String> {
    let ours: BTreeSet<&str> = STRUCTS
        .iter()
        .flat_map(|structs| structs.iter().map(|c| c.name))
        .chain(WORDS.iter().flat_map(|words| words.iter().map(|word| word.name)))
        .chain(ENUMS.iter().flat_map(|enums| enums.iter().map(|c_enum| c_enum.c_type.name)))
        .chain(NOT_DESCRIBED.iter().copied())
        .collect();
    typedefs(code).difference(&ours).map(|name| format!("{name}: not described here")).collect()
}

fn differences(cc: &str, root: &Path, path: &Path) -> Vec<String> {
    let text = std::fs::read_to_string(path).unwrap();
    let is_6 = text.contains(ROCM_6_MACRO);
    let (release, version) =
        if is_6 { (Releases::ROCM_6_2_4, " ROCm 6") } else { (Releases::ROCM_5_2_3, " ROCm 5") };

    let report = check(cc, root, &[path.to_owned()], &probes());
    report.print(path, version);
    let mut differences = report.wrong;
    if is_6 {
        differences.extend(report.newer.iter().map(|what| format!("{what}: in no known header")));
    }
    differences.extend(type_differences(&without_comments(&text)));

    let prototypes = path.with_file_name("hsakmt.h");
    let text = std::fs::read_to_string(&prototypes).unwrap();
    differences.extend(function_differences(&without_comments(&text), release));
    differences.into_iter().map(|what| format!("{}: {what}", path.display())).collect()
}

fn candidates(root: &Path) -> Vec<PathBuf> {
    let places = [root.join("hsakmttypes.h"), root.join("hsakmt/hsakmttypes.h")];
    places.into_iter().filter(|path| path.is_file()).collect()
}

#[test]
fn headers_agree() {
    let cc = match compiler() {
        Ok(cc) => cc,
        Err(why) => return println!("SKIPPED: {why}"),
    };
    let (roots, named) = roots();
    let mut wrong = Vec::new();
    let mut checked = 0;
    for root in &roots {
        let headers = candidates(root);
        if headers.is_empty() {
            println!("SKIPPED: no hsakmttypes.h in {} (Debian: apt install libhsakmt-dev)", root.display());
        }
        for path in headers {
            checked += 1;
            wrong.extend(differences(&cc, root, &path));
        }
    }
    assert!(checked > 0 || !named, "none of the directories in {HEADER_DIRS} has hsakmttypes.h");
    assert!(wrong.is_empty(), "headers differ:\n{}", wrong.join("\n"));
}

#[test]
fn prototypes_are_counted() {
    let code = without_comments(
        "HSAKMT_STATUS HSAKMTAPI hsaKmtA( void ) ; /* hsaKmtB(int) */\n HSAKMT_STATUS\nhsaKmtC(\n int a, // in, out\n int b[]);",
    );
    assert_eq!(prototypes(&code), BTreeMap::from([("A", 0), ("C", 2)]));
}
