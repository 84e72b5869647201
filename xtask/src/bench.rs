//! `cargo xtask bench`: measurements, printed as ratios so that they mean something on any machine.

mod compute;
mod dispatch;
mod memory;
mod start;

use anyhow::{Context, Result};
use virtio_kfd_images::{Cache, Fetcher};
use virtio_kfd_tests::Artifacts;

use crate::thunk;
use crate::workspace::Workspace;

/// The package set whose programs and headers the measurements use.
const SET: &str = "rocm-trixie";

/// Options of `cargo xtask bench`.
#[derive(Debug, clap::Args)]
pub struct Options {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, clap::Subcommand)]
enum What {
    /// Time of rocminfo in loop-back, as a ratio to native on the model.
    Start(start::Options),
    /// Times of allocation, mapping and registration in loop-back, as ratios to native on the model.
    Memory(memory::Options),
    /// Times of packets, copies and events in loop-back, as ratios to native on the model.
    Dispatch(dispatch::Options),
    /// Times of HIP programs in loop-back and in a guest, as ratios to native on the model, and the speed of five kernels.
    Compute(compute::Options),
}

/// Runs a measurement and prints it.
pub fn run(options: &Options) -> Result<()> {
    let workspace = Workspace::find()?;
    let cache = Cache::open()?;
    let mut fetcher = Fetcher::new(&cache, false);
    fetcher.ensure(SET)?;
    if let What::Compute(options) = &options.what {
        for set in compute::sets(options)? {
            fetcher.ensure(&set)?;
        }
    }
    workspace.build()?;
    thunk::link(&workspace)?;
    let artifacts = Artifacts::of_workspace(workspace.target(), &cache);
    match &options.what {
        What::Start(options) => start::run(&artifacts, options),
        What::Memory(options) => memory::run(&artifacts, workspace.root(), options),
        What::Dispatch(options) => dispatch::run(&artifacts, workspace.root(), options),
        What::Compute(options) => compute::run(&artifacts, workspace.root(), options),
    }
}

fn median(mut values: Vec<f64>) -> Result<f64> {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().context("no runs")
}
