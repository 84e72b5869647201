//! Guests with a runtime that carries AMD's thunk inside, and HIP on it: programs run on `libkfd_preload.so`.

use std::path::PathBuf;

use anyhow::Result;
use virtio_kfd_images::Archive;

use crate::artifacts::Artifacts;
use crate::gpu_guest::MEMORY_MIB;
use crate::gpu_program::Release;
use crate::installed::{PLACE, command, install};
use crate::vm::{Vm, VmBuilder};

/// The library of the compiler, which HIP loads by itself.
const COMPILER: &str = "libamd_comgr.so.3";

/// Where our library is in the guest.
const LIBRARY: &str = "libkfd_preload.so";

/// Describes a guest with HIP of `release`, and programs in it, each by its name there and its file.
///
/// # Errors
/// Artifacts that have not been built, a set that is not in the cache, or a program's file that cannot be read.
pub fn describe(
    artifacts: &Artifacts,
    release: Release,
    programs: &[(String, PathBuf)],
) -> Result<VmBuilder> {
    let set = release.set();
    let mut builder = Vm::builder(artifacts)?;
    let overlay = builder.overlay();
    add_library(artifacts, overlay)?;
    let compiler = artifacts.packages(set)?.join("usr/lib/x86_64-linux-gnu").join(COMPILER);
    install(artifacts, set, &compiler, COMPILER, overlay)?;
    for (name, file) in programs {
        install(artifacts, set, file, name, overlay)?;
    }
    Ok(builder.memory_mib(MEMORY_MIB))
}

/// How a shell runs a command on our library, in the place of itself and with these variables.
pub fn on_library(variables: &str, command: &str) -> String {
    format!("{variables} LD_PRELOAD=/{PLACE}/{LIBRARY} exec {command}")
}

/// Puts our library where [`on_library`] has it.
///
/// # Errors
/// It has not been built, or cannot be read.
pub fn add_library(artifacts: &Artifacts, overlay: &mut Archive) -> Result<()> {
    overlay.file(&format!("{PLACE}/{LIBRARY}"), &artifacts.program(LIBRARY)?)?;
    Ok(())
}

/// How a shell calls a program of such a guest. What the runtime compiles for itself is kept for the next program.
pub fn call(release: Release, name: &str) -> String {
    on_library("AMD_COMGR_CACHE_DIR=/tmp/comgr", &command(release.set(), name))
}
