//! `kfd-loopback-vm`: keeps a loop-back VM of a `vhost-user-kfd` for several processes of this machine, where otherwise each
//! process is a VM of its own. Their `VIRTIO_KFD_LOOPBACK` names this program's socket in place of the daemon's.

use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, anyhow, bail};
use clap::Parser;
use guest_thunk::transport::TransportError;
use guest_thunk::transport::loopback::LoopbackVm;
use guest_thunk::transport::loopback::host::{Listener, VmHost};
use nix::errno::Errno;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::unistd::geteuid;

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
    let listener = listen(args)?;
    let device = LoopbackVm::connect(&args.device).context("--device")?;
    let host = VmHost::new(device, listener)?;
    host.run(stop.as_fd())?;
    Ok(())
}

/// The socket for processes, or a sentence for whoever named it.
fn listen(args: &Args) -> Result<Listener> {
    let path = &args.socket;
    let shown = path.display();
    if args.device == *path {
        bail!(
            "--device and --socket are both {shown}: processes connect to another socket than the daemon's"
        );
    }
    let directory = match path.parent() {
        Some(parent) if parent.as_os_str().is_empty() => Path::new("."),
        Some(parent) => parent,
        None => Path::new("/"),
    };
    if !directory.is_dir() {
        bail!("--socket {shown}: the directory {} does not exist", directory.display());
    }
    Listener::bind(path).map_err(|error| {
        let TransportError::System { error: cause, .. } = &error else {
            return anyhow!("--socket {shown}: {error}");
        };
        let errno = Errno::from_raw(cause.raw_os_error().unwrap_or(0));
        match errno {
            // One of this kind, and one of another (unix(7)), as a daemon's.
            Errno::EADDRINUSE | Errno::EPROTOTYPE => anyhow!("--socket {shown}: another program is listening on it"),
            Errno::ECONNREFUSED => anyhow!("--socket {shown}: there is a file of this name that is not a socket"),
            Errno::EACCES | Errno::EPERM => anyhow!(
                "--socket {shown}: the user with id {} has no permission in the directory {}",
                geteuid(),
                directory.display()
            ),
            // sun_path of sockaddr_un, less the 0 at its end.
            Errno::ENAMETOOLONG => anyhow!(
                "--socket {shown}: a path of {} bytes, and a socket's has at most 107 with \".{}\" behind it while there is no VM yet",
                path.as_os_str().len(),
                std::process::id()
            ),
            _ => anyhow!("--socket {shown}: {cause}"),
        }
    })
}
