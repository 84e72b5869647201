//! `cargo xtask demo hip`: HIP and OpenCL programs in a guest, compiled by Debian's compilers and not modified.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use virtio_kfd_images::{Fetcher, Layer};
use virtio_kfd_tests::gpu_guest::{self, Program};
use virtio_kfd_tests::gpu_program::{GpuPrograms, Optimisation, Release};
use virtio_kfd_tests::{Artifacts, Guest};

use crate::stack::Stack;
use crate::workspace::{Workspace, with_extension};

/// How long the guest and the daemon may live, and each program.
const LIMIT: Duration = Duration::from_secs(1800);

/// The GPU that the programs are compiled for.
pub const GPU: &str = "gfx906";

/// Package sets that the demo needs beside those of the base.
pub fn fetch(fetcher: &mut Fetcher) -> Result<()> {
    for set in
        [Layer::set(gpu_guest::LAYER)?.as_str(), Release::Trixie.set(), Release::Bookworm.set(), "qemu"]
    {
        fetcher.ensure(set)?;
    }
    Ok(())
}

/// Runs all programs, prints what they print, and answers with 0 if all were right.
pub fn run(workspace: &Workspace, artifacts: &Artifacts, verbose: bool) -> Result<i32> {
    let programs = compile(workspace, artifacts)?;
    artifacts.image()?;
    artifacts.layer(gpu_guest::LAYER)?;
    let stack = Stack::start(artifacts, GPU, LIMIT)?;
    eprintln!("demo: daemon on the model {GPU}");
    let begin = Instant::now();
    let booted =
        gpu_guest::describe(artifacts, &programs)?.limit(LIMIT).vhost_user_gpu(&stack.socket()).boot();
    let guest = booted.map_err(|error| error.context(stack.report()))?;
    eprintln!("demo: guest with kernel {} ({:.1} s)", guest.hello().kernel, begin.elapsed().as_secs_f64());
    gpu_guest::open_to_all(&guest)?;
    let mut failed = Vec::new();
    for program in &programs {
        if !show(&guest, &program.name, &program.call(), &program.arguments)? {
            failed.push(program.name.clone());
        }
    }
    if !show(&guest, "clinfo -l", "clinfo", &["-l".to_owned()])? {
        failed.push("clinfo".to_owned());
    }
    if verbose || !failed.is_empty() {
        eprintln!("{}\n{}", stack.report(), guest.vm().report());
    }
    if failed.is_empty() {
        println!("{} programs and clinfo: all right", programs.len());
    } else {
        println!("failed: {}", failed.join(", "));
    }
    Ok(i32::from(!failed.is_empty()))
}

/// All HIP programs of the suite with optimisation, those without it that live in scratch, and the OpenCL programs.
fn compile(workspace: &Workspace, artifacts: &Artifacts) -> Result<Vec<Program>> {
    let sources = workspace.root().join("tests/tests");
    let mut programs = Vec::new();
    for source in with_extension(&sources.join("hip"), "hip")? {
        programs.push(Program::hip(artifacts, &source, GPU, Optimisation::Full)?);
    }
    programs.push(Program::hip(artifacts, &sources.join("hip/scratch.hip"), GPU, Optimisation::None)?);
    let opencl = GpuPrograms::find(artifacts, Release::Trixie)?;
    for source in with_extension(&sources.join("opencl"), "c")? {
        let stem = source.file_stem().context("a source without a name")?.to_string_lossy();
        let file = opencl.opencl(&source)?;
        // In a guest the conversion of times is not exact enough for more (docs/limits.md).
        let arguments = ["-O3", "loose"].map(str::to_owned).to_vec();
        let adopts = stem == "memory";
        programs.push(Program { name: format!("opencl-{stem}"), file, arguments, adopts });
    }
    eprintln!("demo: {} programs compiled by Debian's clang 17 and 15", programs.len());
    Ok(programs)
}

/// Runs a program and prints its output; whether it ended well.
pub fn show(guest: &Guest, name: &str, program: &str, arguments: &[String]) -> Result<bool> {
    let output = gpu_guest::run(guest, program, arguments, LIMIT)?;
    println!("== {name} ({:.1} s)\n{}", output.exit.wall_ms as f64 / 1000.0, output.text().trim_end());
    if !output.success() {
        println!("{name} failed: {output}");
    }
    Ok(output.success())
}
