//! Guests with HIP and OpenCL in them, and the programs that run there.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};

use crate::artifacts::Artifacts;
use crate::gpu_program::{GpuPrograms, Optimisation};
use crate::guest::{Command, Guest, Output};
use crate::parts::user;
use crate::vm::{Vm, VmBuilder};

/// The layer of the image with HIP and OpenCL.
pub const LAYER: &str = "hip";

/// Memory of such a guest in MiB: the image is about 400 MiB large and is in memory twice while it starts.
pub const MEMORY_MIB: u32 = 2048;

/// Directory of the programs in the guest.
const PROGRAMS: &str = "opt/virtio-kfd";

/// A program for a guest.
#[derive(Debug, Clone)]
pub struct Program {
    /// Its name in the guest, unique among those of one guest.
    pub name: String,
    /// Its file.
    pub file: PathBuf,
    /// Its arguments.
    pub arguments: Vec<String>,
    /// Whether its runtime lends memory of the process to GPUs, which has to be permitted (docs/limits.md).
    pub adopts: bool,
}

impl Program {
    /// A program of the HIP suite, compiled for `gpu`. Its name is that of the source and the optimisation.
    ///
    /// # Errors
    /// The compiler's package set is not in the cache, or the program does not compile.
    pub fn hip(artifacts: &Artifacts, source: &Path, gpu: &str, optimisation: Optimisation) -> Result<Self> {
        let programs = GpuPrograms::find(artifacts, optimisation.release())?;
        let stem = source.file_stem().context("a source without a name")?.to_string_lossy();
        let file = programs.hip(source, gpu, optimisation)?;
        Ok(Self {
            name: format!("{stem}{}", optimisation.option()),
            file,
            arguments: Vec::new(),
            adopts: false,
        })
    }

    /// How a shell calls it in the guest, without its arguments.
    pub fn call(&self) -> String {
        let permission = if self.adopts { "VIRTIO_KFD_REGISTER=adopt " } else { "" };
        format!("{permission}{}", self.place())
    }

    /// Where it is in the guest.
    pub fn place(&self) -> String {
        format!("/{PROGRAMS}/{}", self.name)
    }
}

/// Describes a guest with HIP and OpenCL, and `programs` in it.
///
/// # Errors
/// Artifacts that have not been built, or a program's file that cannot be read.
pub fn describe(artifacts: &Artifacts, programs: &[Program]) -> Result<VmBuilder> {
    let mut builder = Vm::builder(artifacts)?;
    for program in programs {
        let place = program.place();
        builder.overlay().file(place.trim_start_matches('/'), &program.file)?;
    }
    Ok(builder.layer(LAYER).memory_mib(MEMORY_MIB).module("amdgpu"))
}

/// Lets every account use the GPU and the programs.
///
/// # Errors
/// The guest does not answer.
pub fn open_to_all(guest: &Guest) -> Result<()> {
    let script = format!("chmod 666 /dev/dri/renderD*; chmod -R a+rX /{PROGRAMS}");
    guest.run(&Command::shell(&script))?.checked().map(drop)
}

/// Runs a program in the guest as an ordinary user: a path, a name, or what [`Program::call`] says.
///
/// # Errors
/// The guest does not answer.
pub fn run(guest: &Guest, program: &str, arguments: &[String], limit: Duration) -> Result<Output> {
    let mut script = program.to_owned();
    for argument in arguments {
        script.push_str(&format!(" '{argument}'"));
    }
    guest.run(&user(&script).limit(limit))
}
