//! `cargo xtask bench memory`: a C program on the thunk's memory calls, natively on the model and in loop-back.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use virtio_kfd_tests::c_program::Place;
use virtio_kfd_tests::native::{Under, text};
use virtio_kfd_tests::{Artifacts, CProgram};

use super::{SET, median};
use crate::stack::Stack;

/// How long one run of the program may take.
const RUN: Duration = Duration::from_secs(300);

/// Guest memory of the loop-back client, in MiB: the largest measurement and room beside it. It is sparse.
pub const GUEST_MIB: &str = "6144";

/// Options of `cargo xtask bench memory`.
#[derive(Debug, clap::Args)]
pub struct Options {
    /// GPU profile of the model.
    #[arg(long, default_value = "gfx906")]
    profile: String,
    /// Runs of each; the median of their medians counts.
    #[arg(long, default_value_t = 5)]
    runs: usize,
}

/// A measurement: its name and the bytes that it is about.
type Key = (String, u64);

/// Measures and prints.
pub fn run(artifacts: &Artifacts, root: &Path, Options { profile, runs }: &Options) -> Result<()> {
    let program =
        CProgram::compile(&artifacts.packages(SET)?, &root.join("tests/bench/memory.c"), Place::Host)?;
    let limit = RUN.saturating_mul(u32::try_from(*runs).unwrap_or(u32::MAX).saturating_mul(2));
    let stack = Stack::start(artifacts, profile, limit)?;
    let socket = stack.socket();
    let (native_under, loopback_under) =
        (Under::model(artifacts, profile)?, Under::loopback(artifacts, &socket)?);
    let mut native = BTreeMap::new();
    let mut loopback = BTreeMap::new();
    for _ in 0..*runs {
        collect(&mut native, program.command(&native_under))?;
        let mut command = program.command(&loopback_under);
        command.env("VIRTIO_KFD_LOOPBACK_RAM", GUEST_MIB).env("VIRTIO_KFD_REGISTER", "adopt");
        collect(&mut loopback, command).with_context(|| stack.report())?;
    }
    println!("| measurement | bytes | native | loop-back | ratio |\n|---|---|---|---|---|");
    for (key, times) in native {
        let ours = loopback.remove(&key).with_context(|| format!("{} is missing in loop-back", key.0))?;
        let (name, bytes) = key;
        println!("| {name} | {} |{}", size(bytes), row(times, ours)?);
    }
    Ok(())
}

fn row(native: Vec<Option<f64>>, loopback: Vec<Option<f64>>) -> Result<String> {
    let time =
        |times: Vec<Option<f64>>| times.into_iter().collect::<Option<Vec<f64>>>().map(median).transpose();
    let (native, loopback) = (time(native)?, time(loopback)?);
    let show = |time: Option<f64>| time.map_or("refused".to_owned(), |time| format!("{:.1} µs", time * 1e6));
    let ratio = match (native, loopback) {
        (Some(native), Some(loopback)) => format!("{:.2}", loopback / native),
        _ => "-".to_owned(),
    };
    Ok(format!(" {} | {} | {ratio} |", show(native), show(loopback)))
}

/// A number of bytes.
pub fn size(bytes: u64) -> String {
    match bytes {
        _ if bytes.is_multiple_of(1 << 30) => format!("{} GiB", bytes >> 30),
        _ if bytes.is_multiple_of(1 << 20) => format!("{} MiB", bytes >> 20),
        _ => format!("{} KiB", bytes >> 10),
    }
}

/// Runs the program and adds its times, `None` for what was refused.
fn collect(times: &mut BTreeMap<Key, Vec<Option<f64>>>, command: Command) -> Result<()> {
    for line in text(command, RUN)?.lines() {
        let (key, time) = parse(line)?;
        times.entry(key).or_default().push(time);
    }
    Ok(())
}

fn parse(line: &str) -> Result<(Key, Option<f64>)> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let &[name, bytes, time] = words.as_slice() else { bail!("not a measurement: {line}") };
    let bytes = bytes.parse().with_context(|| format!("bytes in {line}"))?;
    let time = match time {
        "refused" => None,
        seconds => Some(seconds.parse().with_context(|| format!("seconds in {line}"))?),
    };
    Ok(((name.to_owned(), bytes), time))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_read_and_others_refused() {
        assert_eq!(parse("system 4096 0.000001500").unwrap(), (("system".into(), 4096), Some(1.5e-6)));
        assert_eq!(parse("register 65536 refused").unwrap(), (("register".into(), 65536), None));
        for line in ["", "system", "system x 1", "system 1 x", "alloc: NO_MEMORY, cannot go on"] {
            assert!(parse(line).is_err(), "{line}");
        }
    }

    #[test]
    fn a_row_has_a_ratio_only_where_both_sides_have_a_time() {
        let times = |values: &[f64]| values.iter().copied().map(Some).collect::<Vec<_>>();
        let row_of = |native, loopback| row(native, loopback).unwrap();
        assert_eq!(row_of(times(&[2e-6, 1e-6, 9e-6]), times(&[4e-6])), " 2.0 µs | 4.0 µs | 2.00 |");
        assert_eq!(row_of(times(&[1e-6]), vec![None]), " 1.0 µs | refused | - |");
        assert_eq!(
            (size(4096), size(2 << 20), size(1 << 30)),
            ("4 KiB".into(), "2 MiB".into(), "1 GiB".into())
        );
    }
}
