//! A program that calls each of the 109 functions on the list of 2026, the four more that ROCr 7 looks up, and the one more that its
//! driver for virtio calls, through each library that has them: `libhsakmt.so.1`, `libhsakmt_virtio` and `libdtif.so`. Each does what docs/coverage.md says.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "all of this is tests")]

#[path = "every/page.rs"]
mod page;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use virtio_kfd_tests::native::{LOOPBACK_VARIABLE, text};
use virtio_kfd_tests::parts::package_path;
use virtio_kfd_tests::{Artifacts, CProgram, Daemon, need};

const SET: &str = "rocm-trixie";
const LIMIT: Duration = Duration::from_secs(240);

/// Sizes of HsaNodeProperties, HsaIoLinkProperties, HsaCacheProperties and HsaQueueInfo.
type Sizes = [&'static str; 4];

/// Runs the program in loop-back.
fn call_all(
    artifacts: &Artifacts,
    program: &CProgram,
    library: &Path,
    prefix: &str,
    sizes: Sizes,
    preload: Option<&Path>,
) -> String {
    let daemon = Daemon::start(artifacts, "model:gfx906", &[]).unwrap();
    let mut command = Command::new(program.path());
    command.arg(library).arg(prefix).args(sizes).env(LOOPBACK_VARIABLE, daemon.socket());
    if let Some(preload) = preload {
        command.env("LD_PRELOAD", preload);
    }
    text(command, LIMIT).unwrap_or_else(|error| panic!("{error:#}\n{}", daemon.report()))
}

#[track_caller]
fn does_what_the_page_says(output: &str) {
    page::check(output, true);
}

fn parts() -> anyhow::Result<(Artifacts, CProgram)> {
    let artifacts = Artifacts::for_thunk(&[], &[SET])?;
    let root = artifacts.packages(SET)?;
    let program = CProgram::compile_alone(&root, &package_path("tests/c/every.c")).unwrap();
    Ok((artifacts, program))
}

#[test]
fn libhsakmt_does_what_the_page_says() {
    let (artifacts, program) = need!(parts());
    let library = need!(artifacts.thunk());
    does_what_the_page_says(&call_all(
        &artifacts,
        &program,
        &library,
        "-",
        ["356", "48", "1056", "68"],
        None,
    ));
}

#[test]
fn libhsakmt_virtio_does_the_same_in_each_layout() {
    let (artifacts, program) = need!(parts());
    for (layout, sizes) in [
        ("368", ["368", "52", "1056", "68"]),
        ("376", ["376", "52", "1056", "68"]),
        ("392", ["392", "52", "1056", "68"]),
        ("396", ["396", "52", "1056", "68"]),
        ("396-1060", ["396", "52", "1060", "76"]),
    ] {
        let library = need!(artifacts.virtio(layout, "libhsakmt_virtio.so.1"));
        let output = call_all(&artifacts, &program, &library, "v", sizes, None);
        does_what_the_page_says(&output);
        let newest = sizes[3] != "68";
        assert_eq!(
            output.contains("save area is larger than what is used: 1\n"),
            newest,
            "{layout}: {output}"
        );
    }
}

/// A library that is named as the runtime, with these texts in it.
fn runtime(directory: &Path, texts: &[&str]) -> PathBuf {
    let (source, library) = (directory.join("runtime.c"), directory.join("libhsa-runtime64.so.1"));
    let list: Vec<String> = texts.iter().map(|text| format!("\"{text}\"")).collect();
    fs::write(&source, format!("const char *texts[] = {{{}}};\n", list.join(", "))).unwrap();
    let mut cc = Command::new("cc");
    cc.args(["-shared", "-fPIC", "-o"]).arg(&library).arg(&source);
    text(cc, LIMIT).unwrap();
    library
}

#[test]
fn libdtif_does_the_same_for_runtimes_that_it_knows() {
    let (artifacts, program) = need!(parts());
    let library = need!(artifacts.dtif());
    let directory = tempfile::tempdir().unwrap();
    for (texts, sizes) in [
        (["capability2", "family_id"], ["368", "52", "1056", "68"]),
        (["capability2", "ctl_stack_size"], ["376", "52", "1056", "68"]),
    ] {
        let runtime = runtime(directory.path(), &texts);
        let output = call_all(&artifacts, &program, &library, "-", sizes, Some(&runtime));
        assert!(output.starts_with("DtifCreate: 1\n"), "{output}");
        does_what_the_page_says(&output);
    }
}

#[test]
fn libdtif_refuses_runtimes_that_it_does_not_know() {
    let (artifacts, program) = need!(parts());
    let library = need!(artifacts.dtif());
    let directory = tempfile::tempdir().unwrap();
    let older = runtime(directory.path(), &["capability", "family_id"]);
    let refused =
        |preload| call_all(&artifacts, &program, &library, "-", ["376", "52", "1056", "68"], preload);
    assert_eq!(refused(Some(&older)), "DtifCreate: 0\n");
    let newer =
        runtime(directory.path(), &["capability2", "ctl_stack_size", "hsaKmtGetNodeWallclockFrequency"]);
    assert_eq!(refused(Some(&newer)), "DtifCreate: 0\n");
    assert_eq!(refused(None), "DtifCreate: 0\n");
}

/// A program with names of its own that a thunk, libdrm and Rust have as well.
const CLASHES: &str = "
    #include <stdio.h>
    int hsaKmtOpenKFD(void) { return 77; }
    int amdgpu_bo_free(void *bo) { (void)bo; return 78; }
    int rust_eh_personality(void) { return 79; }
    int DtifCreate(void) { return 80; }
    int vhsaKmtOpenKFD(void);
    int vhsaKmtGetNodeProperties(unsigned, void *);
    int vhsaKmtAcquireSystemProperties(void *);
    int vhsaKmtCloseKFD(void);
    int main(void) {
        unsigned system[4], node[376 / 4 + 1];
        node[376 / 4] = 0x5a5a5a5a;
        printf(\"%d\", vhsaKmtOpenKFD());
        printf(\" %d\", vhsaKmtAcquireSystemProperties(system));
        printf(\" %d\", vhsaKmtGetNodeProperties(system[0] - 1, node));
        printf(\" %d\", vhsaKmtCloseKFD());
        printf(\" behind %x own %d %d\\n\", node[376 / 4], hsaKmtOpenKFD(), amdgpu_bo_free(0));
    }
";

#[test]
fn the_static_library_shares_a_program_with_other_thunks() {
    let artifacts = need!(Artifacts::find());
    need!(artifacts.program("vhost-user-kfd"));
    let library = need!(artifacts.virtio("376", "libhsakmt_virtio.a"));
    let directory = tempfile::tempdir().unwrap();
    let (source, program) = (directory.path().join("clashes.c"), directory.path().join("clashes"));
    fs::write(&source, CLASHES).unwrap();
    let mut cc = Command::new("cc");
    cc.arg("-o").arg(&program).arg(&source).arg(&library).args([
        "-Wl,--gc-sections",
        "-lgcc_s",
        "-lm",
        "-lpthread",
        "-ldl",
    ]);
    text(cc, LIMIT).unwrap();
    let daemon = Daemon::start(&artifacts, "model:gfx906", &[]).unwrap();
    let mut command = Command::new(&program);
    command.env(LOOPBACK_VARIABLE, daemon.socket());
    assert_eq!(text(command, LIMIT).unwrap(), "0 0 0 0 behind 5a5a5a5a own 77 78\n");
}
