//! A VM in a process of its own, for several guest processes of this machine.
//!
//! The process listens on a `SOCK_SEQPACKET` socket. Each connection is a guest process: a context of the VM, with the blobs
//! that it made or took, all of which end with the connection, as the guest's kernel ends what a process leaves behind. Waits
//! have connections of their own, each with a thread, so that none holds up another one.
//!
//! This is for tests: guest processes map the guest's memory themselves, all of it, and are of one user. What one says here
//! concerns itself alone; what it writes to memory that is not its own is not seen.

mod guest;
mod log;

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, connect, listen, socket_with,
    sockopt,
};

use super::{LoopbackVm, system};
use crate::transport::{Result, TransportError};

/// Most guest processes at a time. A further one finds its connection closed.
pub const MOST_GUESTS: usize = 256;

/// Connections that wait to be taken.
const BACKLOG: i32 = 64;

/// A VM that listens for guest processes.
pub struct VmHost {
    vm: LoopbackVm,
    listener: Listener,
    guests: Arc<AtomicUsize>,
}

/// A socket for guest processes, which is at its path only once there is a VM behind it.
pub struct Listener {
    socket: OwnedFd,
    path: PathBuf,
    /// Where it is now.
    at: PathBuf,
}

/// One of the guest processes that there may be, until dropped.
struct Place(Arc<AtomicUsize>);

impl Place {
    fn take(guests: &Arc<AtomicUsize>) -> Option<Place> {
        let place = Place(Arc::clone(guests));
        // Given back when dropped, also if it was one too many.
        (guests.fetch_add(1, Ordering::Relaxed) < MOST_GUESTS).then_some(place)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A socket of the kind that guest processes connect with.
pub(super) fn seqpacket() -> rustix::io::Result<OwnedFd> {
    socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
}

impl Listener {
    /// A socket for `path`. One that nobody listens on will be replaced.
    ///
    /// # Errors
    /// Something else lies at the path, or another process listens there.
    pub fn bind(path: &Path) -> Result<Listener> {
        let failed = |call| {
            let detail = path.display().to_string();
            move |errno: Errno| system(call, detail, io::Error::from(errno))
        };
        let address = SocketAddrUnix::new(path).map_err(failed("bind"))?;
        let probe = seqpacket().map_err(failed("socket"))?;
        match connect(&probe, &address) {
            Err(Errno::NOENT) => {}
            // The socket of a process that is gone. A file that is no socket has this errno, too.
            Err(Errno::CONNREFUSED) if is_socket(path) => {
                let wrong = |error| system("unlink", path.display().to_string(), error);
                std::fs::remove_file(path).map_err(wrong)?;
            }
            Err(errno) => return Err(failed("bind")(errno)),
            Ok(()) => return Err(failed("bind")(Errno::ADDRINUSE)),
        }
        let mut at = path.as_os_str().to_owned();
        at.push(format!(".{}", std::process::id()));
        let at = PathBuf::from(at);
        let address = SocketAddrUnix::new(&at).map_err(failed("bind"))?;
        let socket = seqpacket().map_err(failed("socket"))?;
        bind(&socket, &address).map_err(failed("bind"))?;
        let listener = Listener { socket, path: path.to_owned(), at };
        listen(&listener.socket, BACKLOG).map_err(failed("listen"))?;
        Ok(listener)
    }

    /// Puts it at its path.
    fn show(&mut self) -> Result<()> {
        let failed = |error| system("rename", self.path.display().to_string(), error);
        std::fs::rename(&self.at, &self.path).map_err(failed)?;
        self.at.clone_from(&self.path);
        Ok(())
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        // It may have been taken away already.
        let _ = std::fs::remove_file(&self.at);
    }
}

impl VmHost {
    /// Lets guest processes in: from now on the socket is at its path.
    ///
    /// # Errors
    /// The socket cannot be put there.
    pub fn new(vm: LoopbackVm, mut listener: Listener) -> Result<VmHost> {
        listener.show()?;
        Ok(VmHost { vm, listener, guests: Arc::default() })
    }

    /// Serves guest processes until `stop` can be read.
    ///
    /// # Errors
    /// The device is gone.
    pub fn run(&self, stop: BorrowedFd<'_>) -> Result<()> {
        loop {
            let mut fds = [
                PollFd::from_borrowed_fd(stop, PollFlags::IN),
                PollFd::new(&self.listener.socket, PollFlags::IN),
                // POLLHUP comes unasked.
                PollFd::from_borrowed_fd(self.vm.device(), PollFlags::empty()),
            ];
            match poll(&mut fds, None) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(errno) => return Err(system("poll", "guest processes", errno.into())),
            }
            let [stop, connection, device] = fds.map(|fd| !fd.revents().is_empty());
            if stop {
                return Ok(());
            }
            if device {
                return Err(TransportError::Lost("the device has closed its vhost-user connection".into()));
            }
            if connection {
                self.accept()?;
            }
        }
    }

    /// Takes a connection. What a guest process does wrong, or has too much of, is its own loss.
    fn accept(&self) -> Result<()> {
        let socket = match accept_with(&self.listener.socket, SocketFlags::CLOEXEC) {
            Ok(socket) => socket,
            Err(Errno::INTR | Errno::CONNABORTED | Errno::AGAIN) => return Ok(()),
            // Guest processes may end and leave some.
            Err(Errno::MFILE | Errno::NFILE | Errno::NOMEM) => {
                std::thread::sleep(std::time::Duration::from_millis(10));
                return Ok(());
            }
            Err(errno) => {
                return Err(system("accept", self.listener.path.display().to_string(), errno.into()));
            }
        };
        let uid = sockopt::socket_peercred(&socket).map(|peer| peer.uid).ok();
        if uid != Some(rustix::process::geteuid()) {
            log::say("a process of another user has been refused");
            return Ok(());
        }
        let Some(place) = Place::take(&self.guests) else {
            log::say(&format!("a guest process beyond {MOST_GUESTS} has been refused"));
            return Ok(());
        };
        let vm = self.vm.clone();
        spawn("kfd-vm-guest", move || {
            let _place = place;
            if let Err(error) = guest::serve(&vm, socket.as_fd()) {
                log::say(&format!("a guest process was ended: {error}"));
            }
        });
        Ok(())
    }
}

fn is_socket(path: &Path) -> bool {
    std::fs::symlink_metadata(path).is_ok_and(|data| data.file_type().is_socket())
}

/// Starts a thread. Where there is none to be had, what it was to serve is dropped, and its other side sees that.
fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> bool {
    let started = std::thread::Builder::new().name(name.to_owned()).spawn(run);
    if let Err(error) = &started {
        log::say(&format!("thread {name}: {error}"));
    }
    started.is_ok()
}
