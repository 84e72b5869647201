//! Guests with a runtime that carries AMD's thunk inside, and HIP on it: programs run on `libkfd_preload.so`.

use std::path::{Path, PathBuf};

use anyhow::Result;

use crate::artifacts::Artifacts;
use crate::gpu_guest::MEMORY_MIB;
use crate::gpu_program::Release;
use crate::installed::{PLACE, command, install};
use crate::vm::{Vm, VmBuilder};

/// The library of the compiler, which HIP loads by itself.
const COMPILER: &str = "libamd_comgr.so.3";

/// Where our library is in the guest.
const LIBRARY: &str = "libkfd_preload.so";

/// Describes a guest with HIP of `release`, its GPU served at `socket`, and programs in it, each by its name there and its file.
///
/// # Errors
/// Artifacts that have not been built, a set that is not in the cache, or a program's file that cannot be read.
pub fn describe(
    artifacts: &Artifacts,
    release: Release,
    socket: &Path,
    programs: &[(String, PathBuf)],
) -> Result<VmBuilder> {
    let set = release.set();
    let mut builder = Vm::builder(artifacts)?;
    let overlay = builder.overlay();
    overlay.file(&format!("{PLACE}/{LIBRARY}"), &artifacts.program(LIBRARY)?)?;
    let compiler = artifacts.packages(set)?.join("usr/lib/x86_64-linux-gnu").join(COMPILER);
    install(artifacts, set, &compiler, COMPILER, overlay)?;
    for (name, file) in programs {
        install(artifacts, set, file, name, overlay)?;
    }
    Ok(builder.memory_mib(MEMORY_MIB).vhost_user_gpu(socket))
}

/// How a shell calls a program of such a guest. What the runtime compiles for itself is kept for the next program.
pub fn call(release: Release, name: &str) -> String {
    let program = command(release.set(), name);
    format!("AMD_COMGR_CACHE_DIR=/tmp/comgr LD_PRELOAD=/{PLACE}/{LIBRARY} {program}")
}
