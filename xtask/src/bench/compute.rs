//! `cargo xtask bench compute`: the suite of HIP programs, natively on the model, in loop-back and in a guest, and how fast the model
//! runs five kernels.

use std::path::Path;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use virtio_kfd_images::{BaseImage, Layer};
use virtio_kfd_tests::gpu_guest::{self, Program};
use virtio_kfd_tests::gpu_program::{GpuPrograms, Optimisation, Release};
use virtio_kfd_tests::native::{Under, run as output};
use virtio_kfd_tests::{Artifacts, Guest, Runtime};

use super::median;
use crate::stack::Stack;
use crate::workspace::with_extension;

/// How long one run of a program may take.
const RUN: Duration = Duration::from_secs(300);

/// The GPU that the programs are compiled for, and whose instructions the model has.
const GPU: &str = "gfx906";

/// The kernels of tests/bench/kernels.hip: what it is told, and what each stands for.
const KERNELS: [(&str, &str); 5] = [
    ("f32", "fused multiplications and additions in registers"),
    ("f64", "the same with doubles"),
    ("integers", "shifts, exclusive or, additions"),
    ("product", "matrix product by tiles in LDS, with barriers"),
    ("stream", "sums over global memory"),
];

/// Tells the model to print what each dispatch took.
const STATISTICS: (&str, &str) = ("VIRTIO_KFD_MODEL_STATS", "1");

/// Options of `cargo xtask bench compute`.
#[derive(Debug, clap::Args)]
pub struct Options {
    /// Runs of each program; the median counts.
    #[arg(long, default_value_t = 5)]
    runs: usize,
    /// Leave the guest in QEMU out.
    #[arg(long)]
    without_guest: bool,
}

/// The package sets that the programs need.
pub fn sets(options: &Options) -> Result<Vec<String>> {
    let mut sets = vec![Release::Trixie.set().to_owned()];
    if !options.without_guest {
        sets.extend(BaseImage::sets()?);
        sets.extend([Layer::set(gpu_guest::LAYER)?, "qemu".to_owned()]);
    }
    Ok(sets)
}

/// Measures and prints.
pub fn run(artifacts: &Artifacts, root: &Path, options: &Options) -> Result<()> {
    let compiler = GpuPrograms::find(artifacts, Release::Trixie)?;
    let runtime = compiler.runtime();
    let sources = with_extension(&root.join("tests/tests/hip"), "hip")?;
    let programs: Vec<Program> = sources
        .iter()
        .map(|source| Program::hip(artifacts, source, GPU, Optimisation::Full))
        .collect::<Result<_>>()?;
    let kernels = compiler.hip(&root.join("tests/bench/kernels.hip"), GPU, Optimisation::Full)?;
    suite(artifacts, &runtime, &programs, options)?;
    println!(
        "\n| kernel | what it does | wave-instructions | million a second and core |\n|---|---|---|---|"
    );
    let native = Under::model(artifacts, GPU)?;
    for (name, what) in KERNELS {
        let (instructions, rate) = longest(&runtime, &native, &kernels, name, options.runs)?;
        println!("| {name} | {what} | {:.1} million | {rate:.1} |", instructions as f64 / 1e6);
    }
    Ok(())
}

/// Times of one program, or of all.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Times {
    native: f64,
    loopback: f64,
    guest: Option<f64>,
}

/// The suite in all places, each program in turns: a machine that gets slower or faster meanwhile does so for all.
fn suite(artifacts: &Artifacts, runtime: &Runtime, programs: &[Program], options: &Options) -> Result<()> {
    let runs = options.runs;
    let times = u32::try_from(runs.saturating_mul(programs.len()).saturating_mul(3)).unwrap_or(u32::MAX);
    let life = RUN.saturating_mul(times);
    let stack = Stack::start(artifacts, GPU, life)?;
    let socket = stack.socket();
    let machine = if options.without_guest { None } else { Some(Machine::start(artifacts, programs, life)?) };
    let (native, loopback) = (Under::model(artifacts, GPU)?, Under::loopback(artifacts, &socket)?);
    println!("| program | native | loop-back | ratio | guest | ratio |\n|---|---|---|---|---|---|");
    let mut all = Times { native: 0.0, loopback: 0.0, guest: machine.as_ref().map(|_| 0.0) };
    for program in programs {
        let (mut alone, mut ours, mut inside) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..runs {
            alone.push(seconds(native.command(runtime, &program.file)?)?);
            ours.push(seconds(loopback.command(runtime, &program.file)?).with_context(|| stack.report())?);
            if let Some(machine) = &machine {
                inside.push(machine.seconds(program)?);
            }
        }
        let guest = if inside.is_empty() { None } else { Some(median(inside)?) };
        let times = Times { native: median(alone)?, loopback: median(ours)?, guest };
        all.native += times.native;
        all.loopback += times.loopback;
        all.guest = all.guest.zip(times.guest).map(|(sum, time)| sum + time);
        let name = program.name.strip_suffix(Optimisation::Full.option()).unwrap_or(&program.name);
        println!("{}", row(name, times));
    }
    println!("{}", row("all", all));
    Ok(())
}

/// A guest on a daemon of its own.
struct Machine {
    guest: Guest,
    stack: Stack,
}

impl Machine {
    fn start(artifacts: &Artifacts, programs: &[Program], life: Duration) -> Result<Self> {
        artifacts.image()?;
        artifacts.layer(gpu_guest::LAYER)?;
        let stack = Stack::start(artifacts, GPU, life)?;
        let booted =
            gpu_guest::describe(artifacts, programs)?.limit(life).vhost_user_gpu(&stack.socket()).boot();
        let guest = booted.map_err(|error| error.context(stack.report()))?;
        gpu_guest::open_to_all(&guest)?;
        let machine = Self { guest, stack };
        // The first program reads the runtime from the disk's image.
        if let Some(first) = programs.first() {
            machine.seconds(first)?;
        }
        Ok(machine)
    }

    /// What a program takes by the guest's clock.
    fn seconds(&self, program: &Program) -> Result<f64> {
        let output = gpu_guest::run(&self.guest, &program.call(), &program.arguments, RUN)?;
        ensure!(output.success(), "{} in the guest: {output}\n{}", program.name, self.stack.report());
        Ok(output.exit.wall_ms as f64 / 1e3)
    }
}

fn row(name: &str, Times { native, loopback, guest }: Times) -> String {
    let ours = |seconds: f64| format!("{:.0} ms | {:.2}", seconds * 1e3, seconds / native);
    let guest = guest.map_or_else(|| "- | -".to_owned(), ours);
    format!("| {name} | {:.0} ms | {} | {guest} |", native * 1e3, ours(loopback))
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

/// Number of instructions of the longest dispatch of the program with this argument, and the median of the rates at which it ran,
/// in millions a second of CPU time.
fn longest(
    runtime: &Runtime,
    native: &Under<'_>,
    program: &Path,
    argument: &str,
    runs: usize,
) -> Result<(u64, f64)> {
    let (mut instructions, mut rates) = (0, Vec::new());
    for _ in 0..runs {
        let mut command = native.command(runtime, program)?;
        command.arg(argument).env(STATISTICS.0, STATISTICS.1);
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

/// Instructions and microseconds of CPU time of a line that the model prints for a dispatch.
fn dispatch(line: &str) -> Option<(u64, f64)> {
    let (count, times) = line.strip_prefix("kfd-model: dispatch: ")?.split_once(" wave-instructions in ")?;
    let (_, time) = times.split_once(" us, ")?;
    Some((count.parse().ok()?, time.strip_suffix(" us of CPU time")?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_dispatches_are_read_and_others_passed_over() {
        let line = "kfd-model: dispatch: 1200 wave-instructions in 34 us, 61 us of CPU time";
        assert_eq!(dispatch(line), Some((1200, 61.0)));
        for line in ["", "kfd-model: dispatch: x wave-instructions in 34 us", "kfd-model: gfx906", "34 us"] {
            assert_eq!(dispatch(line), None, "{line}");
        }
    }

    #[test]
    fn a_row_has_the_ratios_of_its_times() {
        let mut times = Times { native: 0.2, loopback: 0.21, guest: Some(3.0) };
        assert_eq!(row("sort", times), "| sort | 200 ms | 210 ms | 1.05 | 3000 ms | 15.00 |");
        times.guest = None;
        assert_eq!(row("sort", times), "| sort | 200 ms | 210 ms | 1.05 | - | - |");
    }
}
