//! `cargo xtask fuzz`: the protocol's fuzz targets, built with coverage by the stable compiler.

use std::path::PathBuf;

use anyhow::{Context, Result};
use virtio_kfd_images::tool;

use crate::report::Tally;
use crate::workspace::{Workspace, run as run_command};

/// Options of `cargo xtask fuzz`.
#[derive(Debug, clap::Args)]
pub struct Options {
    /// Only these targets; all of them when none is named.
    #[arg(value_parser = clap::builder::PossibleValuesParser::new(TARGETS))]
    only: Vec<String>,

    /// How long each target runs.
    #[arg(long, value_name = "N", default_value_t = 60)]
    seconds: u32,

    /// Where what is found is kept from run to run; the workspace's target directory if not given.
    #[arg(long, value_name = "DIR")]
    corpus: Option<PathBuf>,
}

const TARGETS: [&str; 4] = ["frame", "request", "answer", "archive"];

/// The instrumentation that libFuzzer needs, in the stable compiler's spelling (a sanitizer needs a nightly one).
const FLAGS: [&str; 8] = [
    "-Cpasses=sancov-module",
    "-Cllvm-args=-sanitizer-coverage-level=4",
    "-Cllvm-args=-sanitizer-coverage-inline-8bit-counters",
    "-Cllvm-args=-sanitizer-coverage-pc-table",
    "-Cllvm-args=-sanitizer-coverage-trace-compares",
    "-Ccodegen-units=1",
    "--cfg",
    "fuzzing",
];

/// A target must be named for the flags not to reach build scripts.
const TRIPLE: &str = "x86_64-unknown-linux-gnu";

/// Builds and runs the targets, one after the other; the answer is the exit status.
pub fn run(options: &Options) -> Result<i32> {
    tool::require(&["c++"])?;
    let workspace = Workspace::find()?;
    let target = workspace.target().join("fuzz");
    let corpus = options.corpus.clone().unwrap_or_else(|| target.join("corpus"));
    let seeds = target.join("seeds");

    let seeds_argument = seeds.to_str().context("the target directory's path is no UTF-8")?;
    run_command(&mut workspace.cargo(&[
        "run",
        "--quiet",
        "--package",
        "virtio-kfd-protocol",
        "--example",
        "fuzz_seeds",
        seeds_argument,
    ]))?;
    let mut build = workspace.cargo(&["build", "--release", "--target", TRIPLE]);
    build.current_dir(workspace.root().join("protocol/fuzz"));
    build.env("CARGO_TARGET_DIR", &target).env("CARGO_ENCODED_RUSTFLAGS", FLAGS.join("\u{1f}"));
    run_command(&mut build)?;

    let mut tally = Tally::default();
    for name in TARGETS {
        if !options.only.is_empty() && !options.only.iter().any(|wanted| wanted == name) {
            continue;
        }
        eprintln!("fuzz: {name}, {} s", options.seconds);
        let found = corpus.join(name);
        std::fs::create_dir_all(&found).with_context(|| format!("make {}", found.display()))?;
        let mut fuzzer = std::process::Command::new(target.join(TRIPLE).join("release").join(name));
        fuzzer
            .arg(format!("-max_total_time={}", options.seconds))
            .arg(format!("-dict={}", seeds.join("dictionary").display()))
            .arg(format!("-artifact_prefix={}/", corpus.display()))
            .args(["-max_len=4096", "-print_final_stats=1", "-verbosity=0"])
            .arg(&found)
            .arg(seeds.join(name));
        let held = run_command(&mut fuzzer);
        tally.count(held.is_ok());
        println!(
            "fuzz {name}: {}",
            held.map_or_else(|error| format!("FAILED: {error:#}"), |()| "ok".to_owned())
        );
    }
    println!("{tally}");
    Ok(i32::from(tally.failed > 0))
}
