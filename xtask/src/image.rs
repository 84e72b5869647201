//! `cargo xtask image`: build the guest image and say how it is booted.

use std::path::PathBuf;

use anyhow::{Context, Result};
use virtio_kfd_images::{BaseImage, Cache, Fetcher};
use virtio_kfd_tests::Artifacts;

use crate::workspace::Workspace;

/// Options of `cargo xtask image`.
#[derive(Debug, clap::Args)]
pub struct Options {
    /// Write a complete initramfs (base, agent and guest library as far as they are built) to this file.
    #[arg(long)]
    output: Option<PathBuf>,
}

/// Builds the image and prints where its parts lie.
pub fn run(options: &Options) -> Result<()> {
    let cache = Cache::open()?;
    let mut fetcher = Fetcher::new(&cache, false);
    let [kernel, runtime] = BaseImage::sets()?;
    let image = BaseImage::ensure(&cache, &fetcher.ensure(&kernel)?, &fetcher.ensure(&runtime)?)?;
    println!("kernel: {}", image.kernel().display());
    if let Some(output) = &options.output {
        let workspace = Workspace::find()?;
        let overlay = Artifacts::of_workspace(workspace.target(), &cache).overlay()?;
        image.with_overlay(&overlay, output).with_context(|| format!("write {}", output.display()))?;
        println!("initrd: {}", output.display());
        println!("append: console=ttyS0 kfd.modules=virtio_gpu,amdgpu");
    } else {
        println!("base: {}", image.archive().display());
    }
    Ok(())
}
