//! The project's commands: `cargo xtask demo`, `cargo xtask test` and what they are made of.

mod packages;

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
    /// Fetch the Debian packages that the demo and the tests need into the user's cache.
    Packages(packages::Options),
}

fn main() -> anyhow::Result<()> {
    match Arguments::parse().command {
        Command::Packages(options) => packages::run(&options),
    }
}
