//! Every struct, field, constant and ioctl of this crate against the installed C headers (linux-libc-dev,
//! libdrm-dev). `VIRTIO_KFD_HEADER_DIRS=/a/usr/include:/b/usr/include` checks other ones.

#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::panic,
    reason = "test code, helpers included"
)]

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use kfd_abi::ioctl::Ioctl;
use kfd_abi::layout::{self, Since};
use kfd_abi::{HEADERS, Header, kfd, version};

mod header_check;
use header_check::{HEADER_DIRS, Probe, check, compiler, const_probes, roots, struct_probes};

const KFD_HEADER: &str = "linux/kfd_ioctl.h";

/// Headers that differ from the kernel's own: where, what, and their value.
const KNOWN_DIFFERENCES: &[(&str, &str, u64)] = &[
    // libdrm 2.4.134 pads the struct at its end where the kernel pads before tcc_disabled_mask; all offsets
    // are the same and the kernel fills no more than its own 440 bytes.
    ("libdrm/amdgpu_drm.h", "sizeof(struct drm_amdgpu_info_device)", 448),
];

fn ioctl_probe(ioctl: &Ioctl, header: &Header) -> Probe {
    let name = format!("{}{}", ioctl.prefix, ioctl.name);
    let kfd = header.include == KFD_HEADER;
    // The size is part of the request number; the struct's own probe says when it last grew.
    let size_bits = 0x3fff_u64 << 16;
    let grew = header
        .structs
        .iter()
        .flat_map(|structs| structs.iter())
        .any(|c| c.size == ioctl.size && c.size_since != Since::Always);
    let mask = if grew { !size_bits } else { u64::MAX };
    // DRM headers carry no version: there an ioctl that is not defined is newer.
    Probe {
        what: name.clone(),
        since: if kfd {
            vec![Since::KfdMinor(ioctl.since_minor)]
        } else {
            vec![Since::Defined("A_VERSION_OF_DRM")]
        },
        macro_name: Some(name.clone()),
        expression: format!("(unsigned long long)({name}) & {mask:#x}ull"),
        expected: u64::from(ioctl.request) & mask,
        bits: 32,
    }
}

fn probes(header: &Header) -> Vec<Probe> {
    let mut probes = Vec::new();
    for structs in header.structs {
        probes.extend(struct_probes(structs));
    }
    for consts in header.consts {
        probes.extend(const_probes(consts));
    }
    probes.extend(header.ioctls.iter().map(|ioctl| ioctl_probe(ioctl, header)));
    probes
}

fn command_end_probe(minor: u32) -> Probe {
    Probe {
        what: "AMDKFD_COMMAND_END".into(),
        since: vec![],
        macro_name: Some("AMDKFD_COMMAND_END".into()),
        expression: "AMDKFD_COMMAND_END".into(),
        expected: kfd::command_end(minor).into(),
        bits: 32,
    }
}

fn is_known(path: &Path, wrong: &str) -> bool {
    let known = KNOWN_DIFFERENCES.iter().any(|(at, what, value)| {
        path.ends_with(at) && wrong.starts_with(&format!("{what}: C has {value:#x},"))
    });
    if known {
        println!("{}: known difference: {wrong}", path.display());
    }
    known
}

/// The places that Debian's packages put a header at.
fn candidates(root: &Path, include: &str) -> Vec<PathBuf> {
    let libdrm = include.strip_prefix("drm/").map(|name| root.join("libdrm").join(name));
    [Some(root.join(include)), libdrm].into_iter().flatten().filter(|path| path.is_file()).collect()
}

/// The minor version that a kfd_ioctl.h says of itself.
fn kfd_minor(text: &str) -> u32 {
    let line = text.lines().find_map(|line| line.strip_prefix("#define KFD_IOCTL_MINOR_VERSION")).unwrap();
    line.trim().parse().unwrap()
}

/// Ioctls that the header has and the table has not.
fn unknown_ioctls(text: &str, table: &[Ioctl]) -> Vec<String> {
    let known: BTreeSet<String> = table.iter().map(|i| format!("{}{}", i.prefix, i.name)).collect();
    text.lines()
        .filter_map(|line| line.strip_prefix("#define "))
        .filter_map(|rest| rest.split_whitespace().next())
        .filter(|name| name.starts_with("AMDKFD_IOC_") && !known.contains(*name))
        .map(str::to_owned)
        .collect()
}

/// What differs between a header and this crate.
fn differences(cc: &str, root: &Path, header: &Header, path: &Path) -> Vec<String> {
    let text = std::fs::read_to_string(path).unwrap();
    let mut probes = probes(header);
    let mut unknown = Vec::new();
    let mut version = String::new();
    let mut is_newest = root.join("drm").is_dir() && path.starts_with(root.join("drm")) && {
        let kfd = std::fs::read_to_string(root.join(KFD_HEADER));
        kfd.is_ok_and(|text| kfd_minor(&text) == version::NEWEST_MINOR)
    };
    if header.include == KFD_HEADER {
        let minor = kfd_minor(&text);
        version = format!(" 1.{minor}");
        probes.push(command_end_probe(minor));
        unknown = unknown_ioctls(&text, header.ioctls);
        is_newest = minor == version::NEWEST_MINOR;
        if minor > version::NEWEST_MINOR {
            println!("{}: newer than this crate, unknown here: {unknown:?}", path.display());
            unknown.clear();
        }
    }
    let mut report = check(cc, root, &[path.to_owned()], &probes);
    report.wrong.retain(|wrong| !is_known(path, wrong));
    report.print(path, &version);

    let mut differences = report.wrong;
    differences.extend(unknown.into_iter().map(|name| format!("{name}: not in our table")));
    if is_newest {
        // What even the newest known header lacks is a mistake here and not a matter of versions.
        differences.extend(report.newer.iter().map(|what| format!("{what}: in no known header")));
    }
    differences.into_iter().map(|what| format!("{}: {what}", path.display())).collect()
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
        let mut found = false;
        for header in HEADERS {
            for path in candidates(root, header.include) {
                found = true;
                checked += 1;
                wrong.extend(differences(&cc, root, header, &path));
            }
        }
        if !found {
            println!(
                "SKIPPED: no linux/kfd_ioctl.h nor DRM headers in {} (Debian: apt install linux-libc-dev libdrm-dev)",
                root.display()
            );
        }
    }
    assert!(checked > 0 || !named, "none of the directories in {HEADER_DIRS} has any of the headers");
    assert!(wrong.is_empty(), "headers differ:\n{}", wrong.join("\n"));
}

/// A wrong number, a wrong width and a lost macro must each be found.
#[test]
fn check_finds_differences() {
    let cc = match compiler() {
        Ok(cc) => cc,
        Err(why) => return println!("SKIPPED: {why}"),
    };
    let probe = |what: &str, macro_name: Option<&str>, since, expression: &str, expected| Probe {
        what: what.into(),
        since: vec![since],
        macro_name: macro_name.map(str::to_owned),
        expression: expression.into(),
        expected,
        bits: 32,
    };
    let report = check(
        &cc,
        Path::new("/usr/include"),
        &[],
        &[
            probe("right", None, Since::Always, "sizeof(int)", 4),
            probe("wrong", None, Since::Always, "sizeof(int)", 8),
            probe("negative", None, Since::Always, "-1", 0xffff_ffff),
            probe("lost", Some("NO_SUCH_MACRO"), Since::Always, "NO_SUCH_MACRO", 1),
            probe("newer", Some("NO_SUCH_MACRO"), Since::Defined("NO_SUCH_MACRO"), "NO_SUCH_MACRO", 1),
        ],
    );
    assert_eq!(report.agreed, 2);
    assert_eq!(report.newer, ["newer"]);
    assert_eq!(report.wrong.len(), 2, "{:?}", report.wrong);
}

#[test]
fn tables_are_in_order() {
    for header in HEADERS {
        for pair in header.ioctls.windows(2) {
            assert!(pair[0].nr < pair[1].nr, "{} comes before {}", pair[0].name, pair[1].name);
        }
    }
}
