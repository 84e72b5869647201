//! `cargo xtask bench start`: rocminfo.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use virtio_kfd_tests::Artifacts;

use super::median;
use crate::stack::{self, Stack};

/// How long the daemon may live.
const LIMIT: Duration = Duration::from_secs(300);

/// Options of `cargo xtask bench start`.
#[derive(Debug, clap::Args)]
pub struct Options {
    /// GPU profile of the model.
    #[arg(long, default_value = "gfx906")]
    profile: String,
    /// Runs of each; the median counts.
    #[arg(long, default_value_t = 11)]
    runs: usize,
}

/// Measures and prints.
pub fn run(artifacts: &Artifacts, Options { profile, runs }: &Options) -> Result<()> {
    let stack = Stack::start(artifacts, profile, LIMIT)?;
    let (mut native, mut loopback) = (Vec::new(), Vec::new());
    // Taken in turns, so that a machine that gets slower or faster meanwhile does so for both.
    for _ in 0..*runs {
        native.push(seconds(&mut stack::native(artifacts, profile, "rocminfo")?)?);
        let mut command = stack::loopback(artifacts, &stack.socket(), "rocminfo")?;
        loopback.push(seconds(&mut command).with_context(|| stack.report())?);
    }
    let (native, loopback) = (median(native)?, median(loopback)?);
    println!("start: native {:.1} ms, loop-back {:.1} ms", native * 1e3, loopback * 1e3);
    println!("start: ratio {:.2}", loopback / native);
    Ok(())
}

fn seconds(command: &mut Command) -> Result<f64> {
    let begin = Instant::now();
    let output = command.stdin(Stdio::null()).output().context("start rocminfo")?;
    let seconds = begin.elapsed().as_secs_f64();
    if !output.status.success() {
        bail!("rocminfo failed ({}): {}", output.status, String::from_utf8_lossy(&output.stderr));
    }
    Ok(seconds)
}
