//! ROCr's own tests (rocrtst64), as Debian builds them: natively on the model, on our stack, and in a guest.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use virtio_kfd_images::Archive;

use crate::installed::{self, PLACE};
use crate::native::Under;
use crate::runtime::Runtime;

/// The package set with the tests, and the one with the runtime that they were built for.
pub const TESTS: &str = "rocrtst-experimental";
/// See [`TESTS`].
pub const RUNTIME: &str = "rocm-experimental";

/// The program.
const PROGRAM: &str = "rocrtst64";

/// The script that runs it in a guest, with its own loader: launchers look at what they are to run.
const SCRIPT: &str = "rocrtst";

/// Where the tests and their kernels lie in their package, and the variable that says so to the tests.
const DIRECTORY: &str = "usr/libexec/rocm/libhsa-runtime64-tests";
const DIRECTORY_VARIABLE: &str = "ROCRTST_KERNELS_PATH";

/// The library for the supervision of GPUs that the tests are linked to, and how the names of its functions begin.
const MANAGEMENT: &str = "libamd_smi.so.";
const MANAGEMENT_PREFIX: &str = "amdsmi_";

/// The tests, ready to run.
#[derive(Debug, Clone)]
pub struct Rocrtst {
    runtime: Runtime,
    /// The directory with the tests' program and kernels.
    place: PathBuf,
}

impl Rocrtst {
    /// The tests of the set unpacked at `tests`, on the runtime of the one at `runtime`. What stands in for a library that they
    /// need is compiled into `directory`.
    ///
    /// # Errors
    /// The tests are not there, or there is no compiler.
    pub fn new(tests: &Path, runtime: &Path, directory: &Path) -> Result<Self> {
        let place = tests.join(DIRECTORY);
        stand_in(&place.join(PROGRAM), directory)?;
        let runtime = Runtime::new(runtime)
            .with_libraries(&tests.join("usr/lib/x86_64-linux-gnu"))
            .with_libraries(directory);
        Ok(Self { runtime, place })
    }

    /// A command that runs those tests that a filter of googletest names, disabled ones among them.
    ///
    /// # Errors
    /// The set has no loader.
    pub fn command(&self, under: &Under<'_>, filter: &str) -> Result<Command> {
        let mut command = under.command(&self.runtime, &self.place.join(PROGRAM))?;
        command.env(DIRECTORY_VARIABLE, &self.place);
        command.args(arguments(filter));
        Ok(command)
    }

    /// Puts the tests with their kernels for one GPU into a guest.
    ///
    /// # Errors
    /// There are no kernels for it, or the loader does not find a library.
    pub fn install(&self, gpu: &str, overlay: &mut Archive) -> Result<()> {
        installed::install_from(&self.runtime, RUNTIME, &self.place.join(PROGRAM), PROGRAM, overlay)?;
        let kernels = self.place.join(gpu);
        let entries = kernels.read_dir().with_context(|| kernels.display().to_string())?;
        for entry in entries {
            let path = entry.with_context(|| kernels.display().to_string())?.path();
            let name = path.file_name().context("a file without a name")?.to_string_lossy().into_owned();
            // Each directory has a link to the program as well.
            if name.ends_with(".hsaco") {
                overlay.file(&format!("{PLACE}/{TESTS}/{gpu}/{name}"), &path)?;
            }
        }
        let script = format!("#!/bin/sh\nexec {} \"$@\"\n", installed::command(RUNTIME, PROGRAM));
        overlay.bytes(&format!("{PLACE}/{SCRIPT}"), 0o755, script);
        Ok(())
    }
}

fn arguments(filter: &str) -> [String; 3] {
    let filter = format!("--gtest_filter={filter}");
    ["--gtest_also_run_disabled_tests".to_owned(), "--gtest_color=no".to_owned(), filter]
}

/// How a shell in a guest calls the tests that a filter names; `launcher` goes before them.
pub fn call(launcher: &str, filter: &str) -> String {
    let arguments = arguments(filter).join(" ");
    format!("{DIRECTORY_VARIABLE}=/{PLACE}/{TESTS} {launcher} /{PLACE}/{SCRIPT} {arguments}")
}

/// Puts a library in `directory` that has the names of AMD's GPU supervision library which `program` imports; each
/// function says that it is not supported.
///
/// rocrtst64 is linked to that library, but calls it only when it is asked to print clocks and temperatures (its option
/// for that is off). The archive may not have the release that the tests' package names any more, and the real one would
/// find no GPU that it knows.
fn stand_in(program: &Path, directory: &Path) -> Result<()> {
    /// `AMDSMI_STATUS_NOT_SUPPORTED` of amdsmi.h.
    const NOT_SUPPORTED: u32 = 2;
    let data = std::fs::read(program).with_context(|| format!("read {}", program.display()))?;
    // Names end with a zero in the table of an ELF file's dynamic linking.
    let names = || data.split(|byte| *byte == 0).filter_map(|name| std::str::from_utf8(name).ok());
    let is_identifier = |name: &&str| name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
    let functions = names().filter(|name| name.starts_with(MANAGEMENT_PREFIX)).filter(is_identifier);
    let functions: std::collections::BTreeSet<&str> = functions.collect();
    let source: String = functions
        .iter()
        .map(|name| format!("unsigned {name}(void) {{ return {NOT_SUPPORTED}; }}\n"))
        .collect();
    let needed = names().find(|name| name.starts_with(MANAGEMENT));
    let needed = needed.with_context(|| format!("{} needs no {MANAGEMENT}", program.display()))?;
    ensure!(!needed.contains('/'), "the library's name {needed}");
    let path = directory.join("management.c");
    std::fs::write(&path, source).with_context(|| format!("write {}", path.display()))?;
    let mut command = Command::new("cc");
    command.args(["-shared", "-fPIC"]).arg(format!("-Wl,-soname,{needed}"));
    command.arg("-o").arg(directory.join(needed)).arg(&path);
    let output = command.output().context("start cc")?;
    if !output.status.success() {
        bail!("cc {}: {}", path.display(), String::from_utf8_lossy(&output.stderr));
    }
    Ok(())
}
