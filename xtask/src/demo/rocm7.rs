//! `cargo xtask demo rocm7`: a runtime that carries AMD's thunk inside, in a guest: rocminfo, and a HIP program compiled by the
//! compiler of the same Debian suite, all unmodified, on `libkfd_preload.so`.

use std::time::{Duration, Instant};

use anyhow::Result;
use virtio_kfd_images::Fetcher;
use virtio_kfd_tests::gpu_program::{GpuPrograms, Optimisation, Release};
use virtio_kfd_tests::{Artifacts, gpu_guest, seam_guest};

use super::hip::{GPU, show};
use crate::stack::Stack;
use crate::workspace::Workspace;

/// ROCr and HIP 7.2.
const RELEASE: Release = Release::Experimental;

/// How long the guest and the daemon may live.
const LIMIT: Duration = Duration::from_secs(1800);

/// The HIP programs of the suite that are run.
const PROGRAMS: [&str; 2] = ["vectors", "matrix"];

/// Package sets that the demo needs beside those of the base.
pub fn fetch(fetcher: &mut Fetcher) -> Result<()> {
    for set in [RELEASE.set(), "qemu"] {
        fetcher.ensure(set)?;
    }
    Ok(())
}

/// Runs rocminfo and the programs, prints what they print, and answers with 0 if all went well.
pub fn run(workspace: &Workspace, artifacts: &Artifacts, verbose: bool) -> Result<i32> {
    let compiler = GpuPrograms::find(artifacts, RELEASE)?;
    let sources = workspace.root().join("tests/tests/hip");
    let rocminfo = artifacts.packages(RELEASE.set())?.join("usr/bin/rocminfo");
    let mut programs = vec![("rocminfo".to_owned(), rocminfo)];
    for name in PROGRAMS {
        let file = compiler.hip(&sources.join(format!("{name}.hip")), GPU, Optimisation::Full)?;
        programs.push((name.to_owned(), file));
    }
    eprintln!("demo: {} programs compiled by Debian's clang 22", PROGRAMS.len());
    artifacts.image()?;
    let stack = Stack::start(artifacts, GPU, LIMIT)?;
    eprintln!("demo: daemon on the model {GPU}");
    let begin = Instant::now();
    let booted = seam_guest::describe(artifacts, RELEASE, &programs)?
        .limit(LIMIT)
        .vhost_user_gpu(&stack.socket())
        .boot();
    let guest = booted.map_err(|error| error.context(stack.report()))?;
    eprintln!("demo: guest with kernel {} ({:.1} s)", guest.hello().kernel, begin.elapsed().as_secs_f64());
    gpu_guest::open_to_all(&guest)?;
    let mut failed = Vec::new();
    for (name, _) in &programs {
        if !show(&guest, name, &seam_guest::call(RELEASE, name), &[])? {
            failed.push(name.as_str());
        }
    }
    if verbose || !failed.is_empty() {
        eprintln!("{}\n{}", stack.report(), guest.vm().report());
    }
    if failed.is_empty() {
        println!("rocminfo and {} HIP programs on ROCr 7.2: all right", PROGRAMS.len());
    } else {
        println!("failed: {}", failed.join(", "));
    }
    Ok(i32::from(!failed.is_empty()))
}
