//! `cargo xtask bench compute`: the suite of HIP programs, natively on the model and in loop-back, and how fast the model
//! runs five of their kernels.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use virtio_kfd_tests::gpu_program::{GpuPrograms, Optimisation, Release};
use virtio_kfd_tests::native::{Under, run as output};
use virtio_kfd_tests::{Artifacts, Runtime};

use super::median;
use crate::stack::Stack;
use crate::workspace::with_extension;

/// How long one run of a program may take.
const RUN: Duration = Duration::from_secs(300);

/// The GPU that the programs are compiled for, and whose instructions the model has.
const GPU: &str = "gfx906";

/// Programs whose longest kernel stands for a kind of work: LDS and f32, shuffles and atomics, branches, f32 functions, f64.
const KERNELS: [&str; 5] = ["matrix", "reduce", "sort", "floats", "doubles"];

/// Tells the model to print what each dispatch took.
const STATISTICS: (&str, &str) = ("VIRTIO_KFD_MODEL_STATS", "1");

/// Options of `cargo xtask bench compute`.
#[derive(Debug, clap::Args)]
pub struct Options {
    /// Runs of each program; the median counts.
    #[arg(long, default_value_t = 5)]
    runs: usize,
}

/// The package set that the programs need.
pub fn set() -> &'static str {
    Release::Trixie.set()
}

/// Measures and prints.
pub fn run(artifacts: &Artifacts, root: &Path, &Options { runs }: &Options) -> Result<()> {
    let compiler = GpuPrograms::find(artifacts, Release::Trixie)?;
    let runtime = compiler.runtime();
    let sources = with_extension(&root.join("tests/tests/hip"), "hip")?;
    let programs: Vec<(String, PathBuf)> = sources
        .iter()
        .map(|source| Ok((name(source), compiler.hip(source, GPU, Optimisation::Full)?)))
        .collect::<Result<_>>()?;
    let times = u32::try_from(runs.saturating_mul(programs.len()).saturating_mul(2)).unwrap_or(u32::MAX);
    let stack = Stack::start(artifacts, GPU, RUN.saturating_mul(times))?;
    let socket = stack.socket();
    let (native, loopback) = (Under::model(artifacts, GPU)?, Under::loopback(artifacts, &socket)?);
    println!("| program | native | loop-back | ratio |\n|---|---|---|---|");
    let mut sums = (0.0, 0.0);
    for (name, program) in &programs {
        let (mut alone, mut ours) = (Vec::new(), Vec::new());
        // Taken in turns, so that a machine that gets slower or faster meanwhile does so for both.
        for _ in 0..runs {
            alone.push(seconds(native.command(&runtime, program)?)?);
            ours.push(seconds(loopback.command(&runtime, program)?).with_context(|| stack.report())?);
        }
        let (alone, ours) = (median(alone)?, median(ours)?);
        sums = (sums.0 + alone, sums.1 + ours);
        println!("{}", row(name, alone, ours));
    }
    println!("{}", row("all", sums.0, sums.1));
    let threads = std::thread::available_parallelism().context("number of CPUs")?;
    println!("\n| longest kernel of | wave-instructions | million a second, {threads} CPUs |\n|---|---|---|");
    for wanted in KERNELS {
        let (_, program) =
            programs.iter().find(|(name, _)| name == wanted).with_context(|| format!("no {wanted}.hip"))?;
        let (instructions, rate) = longest(&runtime, &native, program, runs)?;
        println!("| {wanted} | {instructions} | {rate:.1} |");
    }
    Ok(())
}

fn name(source: &Path) -> String {
    source.file_stem().map(|stem| stem.to_string_lossy().into_owned()).unwrap_or_default()
}

fn row(name: &str, native: f64, loopback: f64) -> String {
    format!("| {name} | {:.0} ms | {:.0} ms | {:.2} |", native * 1e3, loopback * 1e3, loopback / native)
}

/// Runs a program that checks its own results, and measures it from its start to its end.
fn seconds(command: Command) -> Result<f64> {
    let begin = Instant::now();
    checked(command)?;
    Ok(begin.elapsed().as_secs_f64())
}

fn checked(command: Command) -> Result<Output> {
    let output = output(command, RUN)?;
    if !output.status.success() {
        let (out, error) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        bail!("a program ended with {}: {out}{error}", output.status);
    }
    Ok(output)
}

/// Number of instructions of the program's longest kernel, and the median of the rates at which it ran, in millions a second.
fn longest(runtime: &Runtime, native: &Under<'_>, program: &Path, runs: usize) -> Result<(u64, f64)> {
    let (mut instructions, mut rates) = (0, Vec::new());
    for _ in 0..runs {
        let mut command = native.command(runtime, program)?;
        command.env(STATISTICS.0, STATISTICS.1);
        let output = checked(command)?;
        let text = String::from_utf8_lossy(&output.stderr);
        let (count, micros) = text
            .lines()
            .filter_map(dispatch)
            .max_by_key(|(count, _)| *count)
            .context("the model told of no dispatch")?;
        instructions = count;
        rates.push(count as f64 / micros);
    }
    Ok((instructions, median(rates)?))
}

/// Instructions and microseconds of a line that the model prints for a dispatch.
fn dispatch(line: &str) -> Option<(u64, f64)> {
    let (count, time) = line.strip_prefix("kfd-model: dispatch: ")?.split_once(" wave-instructions in ")?;
    Some((count.parse().ok()?, time.strip_suffix(" us")?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_dispatches_are_read_and_others_passed_over() {
        assert_eq!(dispatch("kfd-model: dispatch: 1200 wave-instructions in 34 us"), Some((1200, 34.0)));
        for line in ["", "kfd-model: dispatch: x wave-instructions in 34 us", "kfd-model: gfx906", "34 us"] {
            assert_eq!(dispatch(line), None, "{line}");
        }
    }

    #[test]
    fn a_row_has_the_ratio_of_its_times() {
        assert_eq!(row("sort", 0.2, 0.21), "| sort | 200 ms | 210 ms | 1.05 |");
    }
}
