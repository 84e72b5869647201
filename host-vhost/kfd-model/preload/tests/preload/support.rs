//! Builds the preload library and runs programs under it.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

/// The directory of this package, as the one who runs the test says (a build can be run elsewhere).
fn package() -> PathBuf {
    std::env::var_os("CARGO_MANIFEST_DIR").map_or_else(|| env!("CARGO_MANIFEST_DIR").into(), PathBuf::from)
}

/// The preload library. Cargo builds a package's cdylib for none of its tests, so it is asked for it.
pub fn library() -> &'static Path {
    static LIBRARY: OnceLock<PathBuf> = OnceLock::new();
    LIBRARY.get_or_init(|| {
        let test = std::env::current_exe().unwrap();
        let profile = test.parent().and_then(Path::parent).unwrap();
        let mut build = Command::new(std::env::var_os("CARGO").unwrap_or("cargo".into()));
        build.args(["build", "--quiet", "--offline", "--lib", "--manifest-path"]);
        build.arg(package().join("Cargo.toml"));
        build.arg("--target-dir").arg(profile.parent().unwrap());
        if profile.ends_with("release") {
            build.arg("--release");
        }
        assert!(build.status().unwrap().success(), "{build:?}");
        profile.join("libkfd_model_preload.so")
    })
}

/// Compiles a C program of these tests into `directory`; `None`, with the reason printed, without a compiler.
pub fn compile(source: &str, directory: &Path) -> Option<PathBuf> {
    let program = directory.join(source.trim_end_matches(".c"));
    let path = package().join("tests/preload").join(source);
    let mut command = Command::new("cc");
    command.args(["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-o"]).arg(&program).arg(path);
    match command.output() {
        Ok(output) => {
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            Some(program)
        }
        Err(error) => {
            println!("skipped: cc: {error}");
            None
        }
    }
}

/// Runs `command` on the model `profile` for at most five minutes.
pub fn run(profile: &str, command: &mut Command) -> Output {
    let mut limited = Command::new("timeout");
    limited.args(["--signal=ABRT", "300"]).arg(command.get_program()).args(command.get_args());
    for (name, value) in command.get_envs() {
        limited.env(name, value.unwrap_or_default());
    }
    limited.env("LC_ALL", "C").env("LD_PRELOAD", library()).env("VIRTIO_KFD_MODEL", profile);
    limited.output().unwrap()
}

/// The standard output of a command that must succeed and complain of nothing.
pub fn output_of(profile: &str, command: &mut Command) -> String {
    let output = run(profile, command);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {}\n{text}\n{errors}", output.status);
    assert_eq!(errors, "", "{command:?}");
    text
}
