//! `cargo xtask packages`: fill the cache with the package sets.

use anyhow::{Result, ensure};
use virtio_kfd_images::{Cache, Fetcher, recipe};

/// Options of `cargo xtask packages`.
#[derive(Debug, clap::Args)]
pub struct Options {
    /// Sets to fetch; all of them when none is named.
    sets: Vec<String>,
    /// Ask the mirror for newer versions even if the cache has the set.
    #[arg(long)]
    refresh: bool,
}

/// Fetches the sets and prints where each lies; those that cannot be had are named at the end.
pub fn run(options: &Options) -> Result<()> {
    let cache = Cache::open()?;
    let mut fetcher = Fetcher::new(&cache, options.refresh);
    let sets =
        if options.sets.is_empty() { recipe::all()?.into_keys().collect() } else { options.sets.clone() };
    // A suite that has moved on must not keep the others from being fetched.
    let mut failed = Vec::new();
    for set in sets {
        match fetcher.ensure(&set) {
            Ok(found) => println!("{set}: {}", found.root().display()),
            Err(error) => {
                eprintln!("packages: {set}: {error}");
                failed.push(set);
            }
        }
    }
    ensure!(failed.is_empty(), "not fetched: {}", failed.join(", "));
    Ok(())
}
