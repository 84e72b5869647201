//! Builds what the tests run: the fixture library and the C program.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

/// The directory of this test's build: `target/PROFILE`.
fn profile_directory() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    test.parent().and_then(Path::parent).unwrap().to_owned()
}

/// The directory of this package, as the one who runs the test says (a build can be run elsewhere).
pub fn package() -> PathBuf {
    std::env::var_os("CARGO_MANIFEST_DIR").map_or_else(|| env!("CARGO_MANIFEST_DIR").into(), PathBuf::from)
}

/// The preload library of `examples/seam_fixture.rs`. Cargo builds examples only for some of its test
/// selections, so it is asked for this one.
pub fn fixture() -> &'static Path {
    static FIXTURE: OnceLock<PathBuf> = OnceLock::new();
    FIXTURE.get_or_init(|| {
        let profile = profile_directory();
        let mut build = Command::new(std::env::var_os("CARGO").unwrap_or("cargo".into()));
        build.args(["build", "--quiet", "--offline", "--example", "seam_fixture", "--manifest-path"]);
        build.arg(package().join("Cargo.toml"));
        build.arg("--target-dir").arg(profile.parent().unwrap());
        if profile.ends_with("release") {
            build.arg("--release");
        }
        assert!(build.status().unwrap().success(), "{build:?}");
        profile.join("examples/libseam_fixture.so")
    })
}

/// The program of `tests/preload/check`, compiled with `flags`; `None` where there is no C compiler.
pub fn compile(directory: &Path, flags: &[&str]) -> Option<PathBuf> {
    let program = directory.join("check");
    let names =
        ["main", "device", "descriptors", "files", "ways", "processes", "vforks", "cancellation", "heap"];
    let sources = names.map(|name| package().join(format!("tests/preload/check/{name}.c")));
    let mut compile = Command::new("cc");
    compile.args(["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-Wno-nonnull", "-g", "-pthread"]);
    compile.arg("-o").arg(&program).args(sources).args(flags);
    match compile.output() {
        Ok(output) => {
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            Some(program)
        }
        Err(error) => {
            println!("skipped: no C compiler (cc: {error})");
            None
        }
    }
}

/// Runs `command` under the fixture for at most five minutes.
pub fn run(command: &[&str], environment: &[(&str, &str)]) -> Output {
    Command::new("timeout")
        .args(["--signal=ABRT", "300"])
        .args(command)
        .envs(environment.iter().copied())
        .env("LC_ALL", "C")
        .env("LD_PRELOAD", fixture())
        .output()
        .unwrap()
}

/// The standard output of a command that must succeed.
pub fn output_of(command: &[&str]) -> String {
    let output = run(command, &[]);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {}\n{errors}", output.status);
    assert_eq!(errors, "", "{command:?}");
    String::from_utf8(output.stdout).unwrap()
}
