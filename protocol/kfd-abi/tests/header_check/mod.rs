//! Compares numbers with what a C compiler says about installed headers: every probe becomes one line of a
//! generated C program. hsakmt-abi's check uses this file too; the crate root names the
//! crate's layout module `layout`.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::layout::{CConst, CConstKind, CStruct, Since};

/// Colon-separated include roots (each as `/usr/include`); without it the system's is taken.
pub const HEADER_DIRS: &str = "VIRTIO_KFD_HEADER_DIRS";

/// One number to compare.
pub struct Probe {
    /// What it is, for messages.
    pub what: String,
    /// Since when a header has it.
    pub since: Vec<Since>,
    /// The macro that must be defined for it.
    pub macro_name: Option<String>,
    /// C expression that gives the number.
    pub expression: String,
    /// What it must be.
    pub expected: u64,
    /// Width in bits of the comparison.
    pub bits: u32,
}

/// What a header said.
pub struct Report {
    /// Probes that agreed.
    pub agreed: usize,
    /// Probes that the header is too old for.
    pub newer: Vec<String>,
    /// Disagreements.
    pub wrong: Vec<String>,
}

/// The include roots to check, and whether they were asked for by name.
pub fn roots() -> (Vec<PathBuf>, bool) {
    match std::env::var_os(HEADER_DIRS) {
        Some(dirs) if !dirs.is_empty() => (std::env::split_paths(&dirs).collect(), true),
        _ => (vec![PathBuf::from("/usr/include")], false),
    }
}

/// The C compiler, or why there is none.
pub fn compiler() -> Result<String, String> {
    let cc = std::env::var("CC").unwrap_or_else(|_| "cc".into());
    match Command::new(&cc).arg("--version").output() {
        Ok(output) if output.status.success() => Ok(cc),
        Ok(output) => Err(format!("{cc} --version ended with {}", output.status)),
        Err(error) => Err(format!("no C compiler {cc}: {error} (Debian: apt install gcc libc6-dev)")),
    }
}

/// Sizes and offsets of structs.
pub fn struct_probes(structs: &[CStruct]) -> Vec<Probe> {
    let mut probes = Vec::new();
    for c in structs {
        probes.push(Probe {
            what: format!("sizeof({})", c.name),
            since: vec![c.since, c.size_since],
            macro_name: None,
            expression: format!("sizeof({})", c.name),
            expected: c.size as u64,
            bits: 64,
        });
        for field in c.fields.iter().filter(|field| !field.name.is_empty()) {
            let member = format!("{}.{}", c.name, field.name);
            probes.push(Probe {
                what: format!("offsetof({member})"),
                since: vec![c.since, field.since],
                macro_name: None,
                expression: format!("offsetof({}, {})", c.name, field.name),
                expected: field.offset as u64,
                bits: 64,
            });
            probes.push(Probe {
                what: format!("sizeof({member})"),
                since: vec![c.since, field.since],
                macro_name: None,
                expression: format!("sizeof((({} *)0)->{})", c.name, field.name),
                expected: field.size as u64,
                bits: 64,
            });
        }
    }
    probes
}

/// Values of constants.
pub fn const_probes(consts: &[CConst]) -> Vec<Probe> {
    let probe = |c: &CConst| {
        let name = format!("{}{}", c.prefix, c.name);
        Probe {
            what: name.clone(),
            since: vec![c.since],
            macro_name: (c.kind == CConstKind::Macro).then(|| name.clone()),
            expression: name,
            expected: c.value,
            bits: c.bits,
        }
    };
    consts.iter().map(probe).collect()
}

fn condition(since: &Since) -> Option<String> {
    match since {
        Since::Always => None,
        Since::KfdMinor(minor) => {
            Some(format!("(KFD_IOCTL_MAJOR_VERSION > 1 || KFD_IOCTL_MINOR_VERSION >= {minor})"))
        }
        Since::Defined(name) => Some(format!("defined({name})")),
    }
}

fn program(headers: &[PathBuf], probes: &[Probe]) -> String {
    let mut text =
        String::from("#include <fcntl.h>\n#include <stddef.h>\n#include <stdio.h>\n#include <string.h>\n");
    for header in headers {
        writeln!(text, "#include \"{}\"", header.display()).unwrap();
    }
    text.push_str("int main(void) {\n");
    for (index, probe) in probes.iter().enumerate() {
        let conditions: Vec<String> = probe.since.iter().filter_map(condition).collect();
        let conditions = if conditions.is_empty() { "1".into() } else { conditions.join(" && ") };
        let print = format!("printf(\"{index} %llx\\n\", (unsigned long long)({}));", probe.expression);
        match &probe.macro_name {
            Some(name) => writeln!(
                text,
                "#if defined({name})\n{print}\n#elif {conditions}\nprintf(\"{index} missing\\n\");\n#endif"
            ),
            None => writeln!(text, "#if {conditions}\n{print}\n#endif"),
        }
        .unwrap();
    }
    text.push_str("return 0;\n}\n");
    text
}

static NEXT_DIR: AtomicU32 = AtomicU32::new(0);

/// A directory of this test that goes away with it.
struct Scratch(PathBuf);

impl Scratch {
    fn new() -> Self {
        let name = format!("headers-{}-{}", std::process::id(), NEXT_DIR.fetch_add(1, Ordering::Relaxed));
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // A left-over directory in the target directory does no harm.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Compiles and runs the probes against these headers, with `root` as include directory.
pub fn check(cc: &str, root: &Path, headers: &[PathBuf], probes: &[Probe]) -> Report {
    let scratch = Scratch::new();
    let source = scratch.0.join("probe.c");
    let binary = scratch.0.join("probe");
    std::fs::write(&source, program(headers, probes)).unwrap();
    // kfd_ioctl.h includes <drm/drm.h> for its integer types. Debian 12 installs that file as libdrm/drm.h.
    let shim = scratch.0.join("shim/drm");
    std::fs::create_dir_all(&shim).unwrap();
    std::fs::write(shim.join("drm.h"), "#include <linux/types.h>\n").unwrap();

    let compiled = Command::new(cc)
        .env("LC_ALL", "C")
        .arg("-w")
        .arg("-I")
        .arg(root)
        .arg("-idirafter")
        .arg(scratch.0.join("shim"))
        .arg("-o")
        .args([&binary, &source])
        .output()
        .unwrap();
    assert!(
        compiled.status.success(),
        "{}: the headers do not have what they should by their version:\n{}",
        root.display(),
        String::from_utf8_lossy(&compiled.stderr)
    );
    let ran = Command::new(&binary).output().unwrap();
    assert!(ran.status.success(), "the probe program ended with {}", ran.status);

    let output = String::from_utf8(ran.stdout).unwrap();
    let answers: BTreeMap<usize, &str> = output
        .lines()
        .map(|line| line.split_once(' ').unwrap())
        .map(|(index, answer)| (index.parse().unwrap(), answer))
        .collect();

    let mut report = Report { agreed: 0, newer: Vec::new(), wrong: Vec::new() };
    for (index, probe) in probes.iter().enumerate() {
        let mask = u64::MAX >> (64 - probe.bits);
        match answers.get(&index) {
            None => report.newer.push(probe.what.clone()),
            Some(&"missing") => {
                report.wrong.push(format!("{}: not defined, by its version it should be", probe.what));
            }
            Some(answer) => {
                let value = u64::from_str_radix(answer, 16).unwrap();
                if value & mask == probe.expected & mask {
                    report.agreed += 1;
                } else {
                    report
                        .wrong
                        .push(format!("{}: C has {value:#x}, we have {:#x}", probe.what, probe.expected));
                }
            }
        }
    }
    report
}

impl Report {
    /// The names of what the header is too old for: a type once, without its members.
    fn newer_names(&self) -> Vec<&str> {
        let mut names: Vec<&str> = Vec::new();
        for what in &self.newer {
            let name = what.split_once('(').map_or(what.as_str(), |(_, rest)| rest.trim_end_matches(')'));
            let of_a_newer_type = name.match_indices('.').any(|(dot, _)| {
                name.get(..dot).is_some_and(|c| self.newer.iter().any(|w| *w == format!("sizeof({c})")))
            });
            if !of_a_newer_type && !names.contains(&name) {
                names.push(name);
            }
        }
        names
    }

    /// Prints the counts and the names of what the header is too old for.
    pub fn print(&self, header: &Path, version: &str) {
        println!(
            "{}{version}: {} agree, {} newer than this header, {} differ",
            header.display(),
            self.agreed,
            self.newer.len(),
            self.wrong.len()
        );
        if !self.newer.is_empty() {
            println!("    newer: {}", self.newer_names().join(", "));
        }
        for what in &self.wrong {
            println!("    differs: {what}");
        }
    }
}
