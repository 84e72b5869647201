//! `kfd-loopback-vm`: keeps a loop-back VM of a `vhost-user-kfd` for several processes of this machine, where otherwise each
//! process is a VM of its own. Their `VIRTIO_KFD_LOOPBACK` names this program's socket in place of the daemon's.

use std::os::fd::AsFd;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::Parser;
use guest_thunk::transport::loopback::LoopbackVm;
use guest_thunk::transport::loopback::host::{Listener, VmHost};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};

/// Keeps a loop-back VM for several processes of this machine.
///
/// VIRTIO_KFD_LOOPBACK_RAM and VIRTIO_KFD_LOOPBACK_SCATTER are read here, not in the processes. It ends with the daemon, or
/// by SIGTERM or SIGINT; the processes then have lost their GPUs.
#[derive(Debug, Parser)]
#[command(version)]
struct Args {
    /// The socket of the vhost-user-kfd.
    #[arg(long)]
    device: PathBuf,
    /// Where to listen for processes.
    #[arg(long)]
    socket: PathBuf,
}

fn main() -> ExitCode {
    match run(&Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("kfd-loopback-vm: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Args) -> Result<()> {
    // Blocked before there is any thread.
    let mut signals = SigSet::empty();
    signals.add(Signal::SIGTERM);
    signals.add(Signal::SIGINT);
    signals.thread_block().context("pthread_sigmask")?;
    let stop =
        SignalFd::with_flags(&signals, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK).context("signalfd")?;
    // Each process has a connection for each call that is under way, and dma-bufs.
    let (_, most) = getrlimit(Resource::RLIMIT_NOFILE).context("getrlimit")?;
    setrlimit(Resource::RLIMIT_NOFILE, most, most).context("setrlimit")?;
    let listener = Listener::bind(&args.socket)?;
    let host = VmHost::new(LoopbackVm::connect(&args.device)?, listener)?;
    host.run(stop.as_fd())?;
    Ok(())
}
