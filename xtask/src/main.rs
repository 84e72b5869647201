//! The project's commands: `cargo xtask demo`, `cargo xtask test` and what they are made of.

mod bench;
mod check;
mod demo;
mod direction;
mod docs;
mod fuzz;
mod gtest;
mod hygiene;
mod image;
mod kfdtest;
mod licences;
mod links;
mod packages;
mod report;
mod rocrtst;
mod stack;
mod test;
mod thunk;
mod variables;
mod workspace;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Commands of the virtio-kfd project.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run Debian's rocminfo on a simulated GPU: in a QEMU guest, or on the host in loop-back.
    Demo(demo::Options),
    /// Run all tests.
    Test(test::Options),
    /// Check formatting, lints, dependency direction, ABI, exports, licences, repository hygiene, links of the documents and what they say of variables.
    Check(check::Options),
    /// Write the pages of docs/ that are generated from code.
    Docs(docs::Options),
    /// Run the protocol's fuzz targets for a while.
    Fuzz(fuzz::Options),
    /// Measure.
    Bench(bench::Options),
    /// Run a kfdtest binary of your own, natively on the model and in loop-back, and compare.
    Kfdtest(kfdtest::Options),
    /// Run ROCr's own tests of Debian's package, natively on the model and in loop-back, and compare.
    Rocrtst(rocrtst::Options),
    /// Build the guest image.
    Image(image::Options),
    /// Build and link the guest library: libhsakmt.so.1, libdtif.so, and libhsakmt_virtio by layout of its caller.
    LinkThunk,
    /// Fetch the Debian packages that the demo and the tests need into the user's cache.
    Packages(packages::Options),
}

fn main() -> ExitCode {
    let done = match Arguments::parse().command {
        Command::Demo(options) => demo::run(&options),
        Command::Test(options) => test::run(&options),
        Command::Check(options) => check::run(&options),
        Command::Docs(options) => docs::run(&options).map(|()| 0),
        Command::Fuzz(options) => fuzz::run(&options),
        Command::Bench(options) => bench::run(&options).map(|()| 0),
        Command::Kfdtest(options) => kfdtest::run(&options),
        Command::Rocrtst(options) => rocrtst::run(&options),
        Command::Image(options) => image::run(&options).map(|()| 0),
        Command::LinkThunk => link_thunk().map(|()| 0),
        Command::Packages(options) => packages::run(&options).map(|()| 0),
    };
    match done {
        Ok(status) => ExitCode::from(u8::try_from(status).unwrap_or(1)),
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn link_thunk() -> anyhow::Result<()> {
    let workspace = workspace::Workspace::find()?;
    workspace::run(&mut workspace.cargo(&["build", "--release", "-p", "guest-thunk"]))?;
    println!("{}", thunk::link(&workspace)?.display());
    for place in thunk::siblings::link(&workspace)? {
        println!("{}", place.display());
    }
    Ok(())
}
