//! HIP and OpenCL programs, compiled by Debian's own compiler out of the unpacked package set, and kept in the cache.
//!
//! The compiler is a program of another Debian release, so its parts run through that release's loader: each is a small
//! shell script, by which the compiler finds the others as well. Programs are dynamically linked against the set and run
//! on the host through its loader ([`Runtime`]), and in a guest that has the set's libraries as they are.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use virtio_kfd_images::cache::content_name;
use virtio_kfd_images::{Cache, packages};

use crate::artifacts::Artifacts;
use crate::native::run;
use crate::runtime::Runtime;

/// The package set with HIP, OpenCL and the compiler.
pub const SET: &str = "hip-trixie";

/// Place of the compiler's programs in the set.
const PROGRAMS: &str = "usr/lib/llvm-17/bin";

/// Place of the compiler's own headers and libraries in the set.
const RESOURCES: &str = "usr/lib/llvm-17/lib/clang/17";

/// The parts of the compiler that a compilation of a HIP program runs.
const PARTS: &[&str] = &["clang", "clang++", "lld", "ld.lld", "clang-offload-bundler"];

/// How long a compilation may take.
const LIMIT: Duration = Duration::from_secs(300);

/// To be changed when the compiler is called in another way.
const VERSION: &str = "1";

/// How far a program is optimised, on the host's and on the GPU's side.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Optimisation {
    /// `-O0`: every value goes through memory, so scratch and flat addresses are used all the time.
    None,
    /// `-O3`.
    Full,
}

impl Optimisation {
    /// Both.
    pub const ALL: [Self; 2] = [Self::None, Self::Full];

    /// The compiler's option.
    pub fn option(self) -> &'static str {
        match self {
            Self::None => "-O0",
            Self::Full => "-O3",
        }
    }
}

/// Debian's HIP and OpenCL: what compiles and what runs.
#[derive(Debug, Clone)]
pub struct GpuPrograms {
    root: PathBuf,
    set: String,
    tools: PathBuf,
    cache: Cache,
}

impl GpuPrograms {
    /// What the cache has.
    ///
    /// # Errors
    /// The package set is not in the cache, or a failed file operation.
    pub fn find(artifacts: &Artifacts) -> Result<Self> {
        let cache = artifacts.cache().clone();
        let set = packages::offline(&cache, SET)?;
        let (root, set) = (set.root(), set.content_name());
        let tools = cache.path(format!("programs/tools-{set}-{VERSION}"))?;
        if !tools.exists() {
            let parent = tools.parent().context("the cache's directory of programs")?;
            let fresh =
                tempfile::Builder::new().prefix("tools").tempdir_in(parent).context("make a directory")?;
            lay_out(fresh.path(), &root)?;
            let fresh = fresh.keep();
            // Another test may have been faster; its directory is the same.
            if fs::rename(&fresh, &tools).is_err() && tools.exists() {
                fs::remove_dir_all(&fresh).with_context(|| format!("remove {}", fresh.display()))?;
            }
        }
        Ok(Self { root, set, tools, cache })
    }

    /// The set as a runtime for the host.
    pub fn runtime(&self) -> Runtime {
        Runtime::new(&self.root)
    }

    /// Directory in which the OpenCL loader of the set finds the set's implementation (`OCL_ICD_VENDORS`).
    pub fn opencl_vendors(&self) -> PathBuf {
        self.root.join("etc/OpenCL/vendors")
    }

    /// Compiles a HIP program for one GPU, such as `gfx906`; `source` may include headers that lie beside it.
    ///
    /// # Errors
    /// A program that does not compile, or a failed file operation; the message has the compiler's.
    pub fn hip(&self, source: &Path, gpu: &str, optimisation: Optimisation) -> Result<PathBuf> {
        let offload = format!("--offload-arch={gpu}");
        let options = ["-x", "hip", &offload, "-std=c++17", optimisation.option()];
        self.compile("clang++", source, &options, &["-lamdhip64"])
    }

    /// Compiles the host's side of an OpenCL program; its kernels are compiled when it runs.
    ///
    /// # Errors
    /// As for [`hip`](Self::hip).
    pub fn opencl(&self, source: &Path) -> Result<PathBuf> {
        let options = ["-std=gnu11", "-O1", "-D_GNU_SOURCE", "-DCL_TARGET_OPENCL_VERSION=200"];
        self.compile("clang", source, &options, &["-l:libOpenCL.so.1", "-lm", "-lpthread"])
    }

    fn compile(
        &self,
        compiler: &str,
        source: &Path,
        options: &[&str],
        libraries: &[&str],
    ) -> Result<PathBuf> {
        let stem = source.file_stem().map(|stem| stem.to_string_lossy().into_owned()).unwrap_or_default();
        let mut parts = vec![VERSION.as_bytes().to_vec(), self.set.clone().into_bytes()];
        parts.push([options, libraries].concat().join("\0").into_bytes());
        let read = |path: &Path| fs::read(path).with_context(|| format!("read {}", path.display()));
        parts.push(read(source)?);
        for header in headers_beside(source)? {
            parts.push(read(&header)?);
        }
        let name = content_name(parts.iter().map(Vec::as_slice));
        let place = self.cache.path(format!("programs/{stem}-{name}"))?;
        if place.exists() {
            return Ok(place);
        }
        let parent = place.parent().context("the cache's directory of programs")?;
        let fresh = tempfile::Builder::new().prefix(&stem).tempdir_in(parent).context("make a directory")?;
        let built = fresh.path().join("program");
        let system = self.tools.join("system");
        let mut command = Command::new(self.tools.join("bin").join(compiler));
        // Without this the compiler looks for its parts where its own program file lies, which is the loader's.
        command.arg("-no-canonical-prefixes");
        command.arg(format!("--sysroot={}", system.display()));
        command.arg("-resource-dir").arg(system.join(RESOURCES));
        command.arg(format!("--rocm-path={}", system.join("usr").display()));
        command.arg(format!(
            "--rocm-device-lib-path={}",
            system.join(RESOURCES).join("amdgcn/bitcode").display()
        ));
        command.args(["-fuse-ld=lld", "-Wall", "-Wextra", "-Werror", "-Wno-unused-command-line-argument"]);
        command.args(options).arg(source).arg("-o").arg(&built).args(libraries);
        command.env("TMPDIR", fresh.path());
        let output = run(command, LIMIT).with_context(|| format!("compile {}", source.display()))?;
        if !output.status.success() {
            bail!("{} {options:?}: {}", source.display(), String::from_utf8_lossy(&output.stderr));
        }
        fs::rename(&built, &place).with_context(|| format!("move a program to {}", place.display()))?;
        Ok(place)
    }
}

/// Makes the scripts and the view of the set that the compiler takes for a whole system.
fn lay_out(directory: &Path, root: &Path) -> Result<()> {
    let Some(quoted) = root.to_str().filter(|text| !text.contains(['\'', '\n'])) else {
        bail!("the cache's path cannot stand in a shell script: {}", root.display());
    };
    let (bin, system) = (directory.join("bin"), directory.join("system"));
    for directory in [&bin, &system] {
        fs::create_dir(directory).with_context(|| format!("create {}", directory.display()))?;
    }
    let libraries = format!("'{quoted}/usr/lib/x86_64-linux-gnu:{quoted}/usr/lib/llvm-17/lib'");
    for part in PARTS {
        let script = bin.join(part);
        let text = format!(
            "#!/bin/sh\nexec '{quoted}/usr/lib/x86_64-linux-gnu/ld-linux-x86-64.so.2' --argv0 \"$0\" \
             --library-path {libraries} '{quoted}/{PROGRAMS}/{part}' \"$@\"\n"
        );
        fs::write(&script, text).with_context(|| format!("write {}", script.display()))?;
        let permissions = fs::Permissions::from_mode(0o755);
        fs::set_permissions(&script, permissions).with_context(|| format!("{}", script.display()))?;
    }
    // The set has a merged /usr without the links that a system has for it; linker scripts name /lib.
    for (link, target) in
        [("usr", root.join("usr")), ("lib", PathBuf::from("usr/lib")), ("lib64", PathBuf::from("usr/lib64"))]
    {
        std::os::unix::fs::symlink(&target, system.join(link))
            .with_context(|| format!("link {} to {}", system.join(link).display(), target.display()))?;
    }
    Ok(())
}

/// Headers in the directory of a source, sorted.
fn headers_beside(source: &Path) -> Result<Vec<PathBuf>> {
    let directory = source.parent().context("a source without a directory")?;
    let entries = fs::read_dir(directory).with_context(|| format!("read {}", directory.display()))?;
    let mut headers: Vec<PathBuf> = entries
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| path.extension() == Some(OsStr::new("h")))
        .collect();
    headers.sort();
    Ok(headers)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_that_does_not_compile_says_why() {
        let programs = crate::need!(Artifacts::find().and_then(|artifacts| GpuPrograms::find(&artifacts)));
        let directory = tempfile::tempdir().unwrap();
        let source = directory.path().join("broken.hip");
        fs::write(&source, "#include <hip/hip_runtime.h>\n__global__ int wrong() { return 1; }\n").unwrap();
        let error = programs.hip(&source, "gfx906", Optimisation::None).unwrap_err().to_string();
        assert!(error.contains("broken.hip:2") && error.contains("must have void return type"), "{error}");
    }

    #[test]
    fn an_unchanged_program_is_compiled_once() {
        let programs = crate::need!(Artifacts::find().and_then(|artifacts| GpuPrograms::find(&artifacts)));
        let directory = tempfile::tempdir().unwrap();
        let source = directory.path().join("once.c");
        fs::write(&source, "#include \"once.h\"\nint main(void) { return STATUS; }\n").unwrap();
        fs::write(directory.path().join("once.h"), "#define STATUS 3\n").unwrap();
        let first = programs.opencl(&source).unwrap();
        let made = first.metadata().unwrap().modified().unwrap();
        assert_eq!(programs.opencl(&source).unwrap(), first);
        assert_eq!(first.metadata().unwrap().modified().unwrap(), made);
        let mut command = programs.runtime().command(first.to_str().unwrap()).unwrap();
        assert_eq!(command.status().unwrap().code(), Some(3));
        fs::write(directory.path().join("once.h"), "#define STATUS 4\n").unwrap();
        let second = programs.opencl(&source).unwrap();
        assert_ne!(second, first);
        for program in [first, second] {
            fs::remove_file(program).unwrap();
        }
    }
}
