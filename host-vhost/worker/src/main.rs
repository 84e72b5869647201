//! `kfd-worker`: started by `vhost-user-kfd` with a channel on descriptor 3.

use std::io::IsTerminal;
use std::os::fd::{FromRawFd, OwnedFd};
use std::process::ExitCode;

use kfd_ipc::{Channel, IPC_FD};
use kfd_worker::ServeError;
use nix::sys::socket::{SockType, getsockopt, sockopt};
use tracing_subscriber::EnvFilter;

fn main() -> ExitCode {
    let filter = EnvFilter::try_from_env("VIRTIO_KFD_LOG").unwrap_or_else(|_| EnvFilter::new("info"));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .init();
    // A panic in a ring's thread alone would leave frames that nobody answers; the device hears of the process's end.
    std::panic::set_hook(Box::new(|panic| {
        tracing::error!("the worker has a fault and ends: {panic}");
        std::process::abort();
    }));
    let Some(channel) = channel() else {
        eprintln!(
            "kfd-worker: descriptor {IPC_FD} is not a channel; this program is started by vhost-user-kfd and not by hand"
        );
        return ExitCode::from(2);
    };
    match kfd_worker::serve(channel) {
        Ok(()) => ExitCode::SUCCESS,
        // Whoever started it has the sentence.
        Err(ServeError::Start(_)) => ExitCode::FAILURE,
        Err(error) => {
            tracing::error!("{error}");
            ExitCode::FAILURE
        }
    }
}

/// The channel at [`IPC_FD`], if there is one.
#[allow(unsafe_code)] // a descriptor that a parent left open can only be taken over by number
fn channel() -> Option<Channel> {
    // SAFETY: nothing in this process has opened or closed a descriptor of that number: this is the first use, at
    // the start of main, and the only one. If it is not open, every use of it fails with EBADF.
    let socket = unsafe { OwnedFd::from_raw_fd(IPC_FD) };
    match getsockopt(&socket, sockopt::SockType) {
        Ok(SockType::SeqPacket) => Some(Channel::from(socket)),
        _ => {
            // Not ours, or not open: dropping it would close it.
            std::mem::forget(socket);
            None
        }
    }
}
