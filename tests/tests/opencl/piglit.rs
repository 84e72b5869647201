//! Where Piglit's tests of OpenCL are, and what they say.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use virtio_kfd_tests::{Artifacts, Runtime};

/// The line of a test that passed, without spaces.
pub const PASS: &str = r#"PIGLIT:{"result":"pass"}"#;

/// Files that its programs need besides the set of HIP and OpenCL, below the root of its set.
const LIBRARIES: &[&str] = &[
    "usr/lib/x86_64-linux-gnu/piglit/lib/libpiglitutil.so.0",
    "usr/lib/x86_64-linux-gnu/piglit/lib/libpiglitutil_cl.so.0",
    "usr/lib/x86_64-linux-gnu/libEGL.so.1",
    "usr/lib/x86_64-linux-gnu/libGLdispatch.so.0",
];

/// Directories of programs that are compiled and run, below [`Piglit::root`].
const PROGRAMS: &[&str] = &["tests/cl/program/execute", "generated_tests/cl"];

/// Debian's package, unpacked.
pub struct Piglit {
    set: PathBuf,
}

impl Piglit {
    /// What the cache has.
    pub fn find(artifacts: &Artifacts) -> Result<Self> {
        Ok(Self { set: artifacts.packages("piglit-trixie")? })
    }

    /// Its own directory.
    pub fn root(&self) -> PathBuf {
        self.set.join("usr/lib/x86_64-linux-gnu/piglit")
    }

    /// What runs a program of [`programs`](Self::programs).
    pub fn tester(&self) -> PathBuf {
        self.root().join("bin/cl-program-tester")
    }

    /// The libraries that it needs besides those of the set of HIP and OpenCL.
    #[allow(dead_code, reason = "not every test that shares this has a guest")]
    pub fn libraries(&self) -> Vec<PathBuf> {
        LIBRARIES.iter().map(|place| self.set.join(place)).collect()
    }

    /// `runtime` with its libraries.
    #[allow(dead_code, reason = "a guest has no such runtime")]
    pub fn runtime(&self, runtime: Runtime) -> Runtime {
        let directories = ["usr/lib/x86_64-linux-gnu/piglit/lib", "usr/lib/x86_64-linux-gnu"];
        directories.iter().fold(runtime, |runtime, place| runtime.with_libraries(&self.set.join(place)))
    }

    /// All programs, sorted. Those that need images are left out: the GPU's blocks for them are not modelled.
    pub fn programs(&self) -> Result<Vec<PathBuf>> {
        let mut found = Vec::new();
        for directory in PROGRAMS {
            collect(&self.root().join(directory), &mut found)?;
        }
        found.retain(|path| {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            !name.starts_with("image-") && !name.starts_with("sampler")
        });
        found.sort();
        Ok(found)
    }
}

fn collect(directory: &Path, found: &mut Vec<PathBuf>) -> Result<()> {
    for entry in std::fs::read_dir(directory).with_context(|| format!("read {}", directory.display()))? {
        let path = entry.context("an entry of a directory")?.path();
        if path.is_dir() {
            collect(&path, found)?;
        } else if path.extension().is_some_and(|extension| extension == "cl" || extension == "program_test") {
            found.push(path);
        }
    }
    Ok(())
}

/// The lines with results, without spaces: one for each part of a test, and the test's own as the last one.
pub fn results(output: &str) -> Vec<String> {
    let lines = output.lines().filter(|line| line.starts_with("PIGLIT:"));
    lines.map(|line| line.split_whitespace().collect::<String>()).collect()
}
