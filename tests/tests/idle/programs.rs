//! The programs that wait, on ROCr and HIP 7.2.4.

use std::path::PathBuf;

use anyhow::Result;
use virtio_kfd_tests::c_program::Place;
use virtio_kfd_tests::gpu_program::{Optimisation, Release};
use virtio_kfd_tests::parts::package_path;
use virtio_kfd_tests::{Artifacts, CProgram, GpuPrograms};

pub const GPU: &str = "gfx906";

/// The runtime, which has AMD's thunk inside, and HIP on it.
pub const RUNTIME: &str = "rocm-experimental";
pub const HIP: Release = Release::Experimental;

/// What a process does while it is measured: what it is called, its package set, its program, and that one's argument.
pub const CASES: [(&str, &str, &str, &str); 3] = [
    ("after hsa_init", RUNTIME, "idle_rocr", "started"),
    ("blocked in a wait", RUNTIME, "idle_rocr", "wait"),
    ("idle in HIP", "hip-experimental", "idle_hip", ""),
];

pub struct Programs {
    rocr: CProgram,
    hip: PathBuf,
}

impl Programs {
    /// Compiles them.
    pub fn find(artifacts: &Artifacts) -> Result<Programs> {
        let root = artifacts.packages(RUNTIME)?;
        let compiler = GpuPrograms::find(artifacts, HIP)?;
        let rocr = CProgram::compile_for_rocr(&root, &package_path("tests/c/idle_rocr.c"), Place::Guest)?;
        let hip = compiler.hip(&package_path("tests/idle/idle.hip"), GPU, Optimisation::Full)?;
        Ok(Programs { rocr, hip })
    }

    /// The file of a program.
    pub fn file(&self, name: &str) -> PathBuf {
        if name == "idle_hip" { self.hip.clone() } else { self.rocr.path().to_owned() }
    }
}
