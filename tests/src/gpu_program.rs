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

/// Debian's releases with a HIP stack.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Release {
    /// Debian 12: HIP 5.2.3, clang 15.
    Bookworm,
    /// Debian 13: HIP 5.7.1, clang 17; and OpenCL.
    Trixie,
    /// Debian forky: HIP 6.4.3 on ROCr 6.4.3, which has the thunk inside; clang 21.
    Forky,
    /// Debian experimental: HIP 7.2.4 on ROCr 7.2.4, which has the thunk inside; clang 22.
    Experimental,
}

/// Where a package set has its things, below its root.
struct Layout {
    set: &'static str,
    /// Directory of the compiler's `bin` and `lib`.
    llvm: &'static str,
    /// The compiler's own headers and libraries.
    resources: &'static str,
    /// The GPU's device libraries.
    bitcode: &'static str,
    loader: &'static str,
    libraries: &'static [&'static str],
    /// What `/lib` is in a system of this release.
    lib: &'static str,
}

impl Release {
    /// Those whose runtime has AMD's thunk inside, the oldest first.
    pub const INSIDE: [Self; 2] = [Self::Forky, Self::Experimental];

    /// The package set with HIP and its compiler.
    pub fn set(self) -> &'static str {
        self.layout().set
    }

    fn layout(self) -> Layout {
        match self {
            Self::Bookworm => Layout {
                set: "hip-bookworm",
                llvm: "usr/lib/llvm-15",
                resources: "usr/lib/llvm-15/lib/clang/15.0.6",
                bitcode: "usr/lib/x86_64-linux-gnu/amdgcn/bitcode",
                loader: "lib/x86_64-linux-gnu/ld-linux-x86-64.so.2",
                libraries: &["usr/lib/x86_64-linux-gnu", "lib/x86_64-linux-gnu", "usr/lib/llvm-15/lib"],
                lib: "lib",
            },
            Self::Trixie => Layout {
                set: "hip-trixie",
                llvm: "usr/lib/llvm-17",
                resources: "usr/lib/llvm-17/lib/clang/17",
                bitcode: "usr/lib/llvm-17/lib/clang/17/amdgcn/bitcode",
                loader: "usr/lib/x86_64-linux-gnu/ld-linux-x86-64.so.2",
                libraries: &["usr/lib/x86_64-linux-gnu", "usr/lib/llvm-17/lib"],
                lib: "usr/lib",
            },
            Self::Forky => Layout {
                set: "hip-forky",
                llvm: "usr/lib/llvm-21",
                resources: "usr/lib/llvm-21/lib/clang/21",
                bitcode: "usr/lib/llvm-21/lib/clang/21/amdgcn/bitcode",
                loader: "usr/lib/x86_64-linux-gnu/ld-linux-x86-64.so.2",
                libraries: &["usr/lib/x86_64-linux-gnu", "usr/lib/llvm-21/lib"],
                lib: "usr/lib",
            },
            Self::Experimental => Layout {
                set: "hip-experimental",
                llvm: "usr/lib/llvm-22",
                resources: "usr/lib/llvm-22/lib/clang/22",
                bitcode: "usr/lib/llvm-22/lib/clang/22/amdgcn/bitcode",
                loader: "usr/lib/x86_64-linux-gnu/ld-linux-x86-64.so.2",
                libraries: &["usr/lib/x86_64-linux-gnu", "usr/lib/llvm-22/lib"],
                lib: "usr/lib",
            },
        }
    }
}

/// The parts of the compiler that a compilation of a HIP program runs.
const PARTS: &[&str] = &["clang", "clang++", "lld", "ld.lld", "clang-offload-bundler"];

/// How long a compilation may take.
const LIMIT: Duration = Duration::from_secs(300);

/// To be changed when the compiler is called in another way.
const VERSION: &str = "2";

/// How far a program is optimised, on the host's and on the GPU's side.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Optimisation {
    /// `-O0`: every value goes through memory, so scratch and flat addresses are used all the time. Right with Debian
    /// 12's compiler only: clang 16 and 17 put reloads of registers before the restoration of EXEC (LLVM issue 61083), so
    /// that branches which lanes take differently go wrong on every GPU.
    None,
    /// `-O3`.
    Full,
}

impl Optimisation {
    /// Both.
    pub const ALL: [Self; 2] = [Self::None, Self::Full];

    /// The release whose compiler is right with it.
    pub fn release(self) -> Release {
        match self {
            Self::None => Release::Bookworm,
            Self::Full => Release::Trixie,
        }
    }

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
    release: Release,
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
    pub fn find(artifacts: &Artifacts, release: Release) -> Result<Self> {
        let cache = artifacts.cache().clone();
        let set = packages::offline(&cache, release.set())?;
        let (root, set) = (set.root(), set.content_name());
        let tools = cache.path(format!("programs/tools-{set}-{VERSION}"))?;
        if !tools.exists() {
            let parent = tools.parent().context("the cache's directory of programs")?;
            let fresh =
                tempfile::Builder::new().prefix("tools").tempdir_in(parent).context("make a directory")?;
            lay_out(fresh.path(), &root, &release.layout())?;
            let fresh = fresh.keep();
            // Another test may have been faster; its directory is the same.
            if fs::rename(&fresh, &tools).is_err() && tools.exists() {
                fs::remove_dir_all(&fresh).with_context(|| format!("remove {}", fresh.display()))?;
            }
        }
        Ok(Self { release, root, set, tools, cache })
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

    /// Compiles the kernels of an OpenCL program built by [`opencl`](Self::opencl) to a code object for one GPU, which the program
    /// takes in place of its source (`@` and the path as its argument). The source is what the program prints when
    /// its argument is `source`.
    ///
    /// # Errors
    /// As for [`hip`](Self::hip), or a program that does not print its source.
    pub fn opencl_kernels(
        &self,
        program: &Path,
        name: &str,
        gpu: &str,
        optimisation: Optimisation,
    ) -> Result<PathBuf> {
        let path = program.to_str().context("the path of a program is not UTF-8")?;
        // Debian 13's, whatever compiles the kernels.
        let mut printer = Self::runtime_of(&self.cache, Release::Trixie)?.command(path)?;
        printer.arg("source");
        let printed = run(printer, LIMIT).with_context(|| format!("the kernels of {name}"))?;
        if !printed.status.success() || printed.stdout.is_empty() {
            bail!("{name} did not print its kernels: {}", String::from_utf8_lossy(&printed.stderr));
        }
        let directory = tempfile::tempdir().context("make a directory")?;
        let source = directory.path().join(format!("{name}.cl"));
        fs::write(&source, &printed.stdout).with_context(|| format!("write {}", source.display()))?;
        let target = format!("-mcpu={gpu}");
        let options =
            ["-x", "cl", "-cl-std=CL2.0", "-target", "amdgcn-amd-amdhsa", &target, optimisation.option()];
        self.compile(
            "clang",
            &source,
            &[&options[..], &["-Xclang", "-finclude-default-header"]].concat(),
            &[],
        )
    }

    fn runtime_of(cache: &Cache, release: Release) -> Result<Runtime> {
        Ok(Runtime::new(packages::offline(cache, release.set())?.root()))
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
        let (system, layout) = (self.tools.join("system"), self.release.layout());
        let mut command = Command::new(self.tools.join("bin").join(compiler));
        // Without this the compiler looks for its parts where its own program file lies, which is the loader's.
        command.arg("-no-canonical-prefixes");
        command.arg(format!("--sysroot={}", system.display()));
        command.arg("-resource-dir").arg(system.join(layout.resources));
        command.arg(format!("--rocm-path={}", system.join("usr").display()));
        command.arg(format!("--rocm-device-lib-path={}", system.join(layout.bitcode).display()));
        command.args([
            "-fuse-ld=lld",
            "-Wall",
            "-Wextra",
            "-Werror",
            "-Wno-unused-command-line-argument",
            "-Wno-infinite-recursion",
        ]);
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
fn lay_out(directory: &Path, root: &Path, layout: &Layout) -> Result<()> {
    let Some(quoted) = root.to_str().filter(|text| !text.contains(['\'', '\n'])) else {
        bail!("the cache's path cannot stand in a shell script: {}", root.display());
    };
    let (bin, system) = (directory.join("bin"), directory.join("system"));
    for directory in [&bin, &system, &system.join("lib64")] {
        fs::create_dir(directory).with_context(|| format!("create {}", directory.display()))?;
    }
    let Layout { llvm, loader, .. } = layout;
    let libraries: Vec<String> = layout.libraries.iter().map(|place| format!("{quoted}/{place}")).collect();
    let libraries = libraries.join(":");
    for part in PARTS {
        let script = bin.join(part);
        let text = format!(
            "#!/bin/sh\nexec '{quoted}/{loader}' --argv0 \"$0\" --library-path '{libraries}' \
             '{quoted}/{llvm}/bin/{part}' \"$@\"\n"
        );
        fs::write(&script, text).with_context(|| format!("write {}", script.display()))?;
        let permissions = fs::Permissions::from_mode(0o755);
        fs::set_permissions(&script, permissions).with_context(|| format!("{}", script.display()))?;
    }
    // A set has no links that a system has for a merged /usr, or some that lead out of it; linker scripts name /lib and
    // /lib64.
    for (link, target) in [
        ("usr", root.join("usr")),
        ("lib", root.join(layout.lib)),
        ("lib64/ld-linux-x86-64.so.2", root.join(loader)),
    ] {
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

    fn programs() -> Result<GpuPrograms> {
        GpuPrograms::find(&Artifacts::find()?, Release::Trixie)
    }

    #[test]
    fn a_program_that_does_not_compile_says_why() {
        let programs = crate::need!(programs());
        let directory = tempfile::tempdir().unwrap();
        let source = directory.path().join("broken.hip");
        fs::write(&source, "#include <hip/hip_runtime.h>\n__global__ int wrong() { return 1; }\n").unwrap();
        let error = programs.hip(&source, "gfx906", Optimisation::None).unwrap_err().to_string();
        assert!(error.contains("broken.hip:2") && error.contains("must have void return type"), "{error}");
    }

    #[test]
    fn an_unchanged_program_is_compiled_once() {
        let programs = crate::need!(programs());
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
