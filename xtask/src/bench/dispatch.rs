//! `cargo xtask bench dispatch`: a C program on queues and events, natively on the model and in loop-back.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use virtio_kfd_tests::c_program::Place;
use virtio_kfd_tests::native::{Under, text};
use virtio_kfd_tests::{Artifacts, CProgram};

use super::memory::{GUEST_MIB, size};
use super::{SET, median};
use crate::stack::Stack;

/// How long one run of the program may take.
const RUN: Duration = Duration::from_secs(300);

/// Options of `cargo xtask bench dispatch`.
#[derive(Debug, clap::Args)]
pub struct Options {
    /// GPU profile of the model. The program speaks AQL, and SDMA as from gfx9 on.
    #[arg(long, default_value = "gfx906")]
    profile: String,
    /// Runs of each, in turns; the medians of their values count.
    #[arg(long, default_value_t = 5)]
    runs: usize,
    /// Measure these alone (dispatch-spinning, dispatch-waiting, fetch-busy, fetch-idle, fetch-still, interrupt-wake,
    /// event-wake, copy-up, copy-down).
    only: Vec<String>,
}

/// A measurement: its name and the bytes that it is about.
type Key = (String, u64);

/// Seconds of the runs: medians and 99th percentiles.
#[derive(Debug, Default)]
struct Times {
    median: Vec<f64>,
    late: Vec<f64>,
}

/// Measures and prints.
pub fn run(artifacts: &Artifacts, root: &Path, Options { profile, runs, only }: &Options) -> Result<()> {
    let program =
        CProgram::compile(&artifacts.packages(SET)?, &root.join("tests/bench/dispatch.c"), Place::Host)?;
    let limit = RUN.saturating_mul(u32::try_from(*runs).unwrap_or(u32::MAX).saturating_mul(2));
    let stack = Stack::start(artifacts, profile, limit)?;
    let socket = stack.socket();
    let (native_under, loopback_under) =
        (Under::model(artifacts, profile)?, Under::loopback(artifacts, &socket)?);
    let (mut native, mut loopback) = (BTreeMap::new(), BTreeMap::new());
    for _ in 0..*runs {
        let command = |under| {
            let mut command = program.command(under);
            command.args(only);
            command
        };
        collect(&mut native, command(&native_under))?;
        let mut command = command(&loopback_under);
        command.env("VIRTIO_KFD_LOOPBACK_RAM", GUEST_MIB);
        collect(&mut loopback, command).with_context(|| stack.report())?;
    }
    println!(
        "| measurement | bytes | native | 99 % | loop-back | 99 % | ratio | ratio of 99 % |\n|---|---|---|---|---|---|---|---|"
    );
    for (key, times) in native {
        let ours = loopback.remove(&key).with_context(|| format!("{} is missing in loop-back", key.0))?;
        let (name, bytes) = key;
        let bytes = if bytes == 0 { "-".to_owned() } else { size(bytes) };
        println!("| {name} | {bytes} |{}", row(times, ours)?);
    }
    Ok(())
}

fn row(native: Times, loopback: Times) -> Result<String> {
    let native = (median(native.median)?, median(native.late)?);
    let loopback = (median(loopback.median)?, median(loopback.late)?);
    let show = |(time, late): (f64, f64)| format!("{:.1} µs | {:.1} µs", time * 1e6, late * 1e6);
    let (ratio, late) = (loopback.0 / native.0, loopback.1 / native.1);
    Ok(format!(" {} | {} | {ratio:.2} | {late:.2} |", show(native), show(loopback)))
}

/// Runs the program and adds its times.
fn collect(times: &mut BTreeMap<Key, Times>, command: Command) -> Result<()> {
    for line in text(command, RUN)?.lines() {
        let (key, median, late) = parse(line)?;
        let times = times.entry(key).or_default();
        times.median.push(median);
        times.late.push(late);
    }
    Ok(())
}

fn parse(line: &str) -> Result<(Key, f64, f64)> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let &[name, bytes, median, late] = words.as_slice() else { bail!("not a measurement: {line}") };
    let bytes = bytes.parse().with_context(|| format!("bytes in {line}"))?;
    let seconds = |text: &str| text.parse().with_context(|| format!("seconds in {line}"));
    Ok(((name.to_owned(), bytes), seconds(median)?, seconds(late)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_read_and_others_refused() {
        let line = "copy-up 4096 0.000001500 0.000002000";
        assert_eq!(parse(line).unwrap(), (("copy-up".into(), 4096), 1.5e-6, 2e-6));
        for line in ["", "copy-up 4096 1", "copy-up x 1 1", "copy-up 1 x 1", "wait: ERROR, cannot go on"] {
            assert!(parse(line).is_err(), "{line}");
        }
    }

    #[test]
    fn a_row_has_medians_and_their_ratios() {
        let times = |median: &[f64], late: &[f64]| Times { median: median.to_vec(), late: late.to_vec() };
        let native = times(&[2e-6, 1e-6, 9e-6], &[4e-6, 4e-6, 5e-6]);
        let row = row(native, times(&[3e-6], &[2e-6])).unwrap();
        assert_eq!(row, " 2.0 µs | 4.0 µs | 3.0 µs | 2.0 µs | 1.50 | 0.50 |");
    }
}
