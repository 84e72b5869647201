//! The socket that the VMM connects to.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use nix::sys::socket::{getsockopt, sockopt};
use thiserror::Error;

use crate::relay;
use crate::spawn::take_inherited;

/// Most bytes of a socket's path: `sun_path` of `sockaddr_un` has 108 (unix(7)), of which the last is 0. This is bound under a longer
/// name first ([`UNFINISHED`]).
const MOST_PATH_BYTES: usize = 107 - UNFINISHED.len();

/// What stands behind the path until the socket listens.
const UNFINISHED: &str = ".new";

/// Why there is no socket.
#[derive(Debug, Error)]
pub enum SocketError {
    /// Neither `--socket` nor `--fd`.
    #[error("give --socket PATH or --fd N: the socket that the VMM connects to")]
    None,
    /// The directory is not there.
    #[error("{option} {path}: the directory {directory} does not exist")]
    Directory {
        /// The option that names it.
        option: &'static str,
        /// As given.
        path: PathBuf,
        /// Its directory.
        directory: PathBuf,
    },
    /// Something else lies there.
    #[error("{option} {path}: there is a file of this name that is not a socket")]
    NotASocket {
        /// The option that names it.
        option: &'static str,
        /// As given.
        path: PathBuf,
    },
    /// Another program listens there.
    #[error("{option} {path}: another program is listening on it")]
    InUse {
        /// The option that names it.
        option: &'static str,
        /// As given.
        path: PathBuf,
    },
    /// Its directory, or a socket that lies there, is not for this user.
    #[error("{option} {path}: the user with id {user} has no permission in the directory {directory}")]
    Permission {
        /// The option that names it.
        option: &'static str,
        /// As given.
        path: PathBuf,
        /// Its directory.
        directory: PathBuf,
        /// The effective user id.
        user: u32,
    },
    /// The kernel's addresses have no room for it.
    #[error("{option} {path}: a path of {found} bytes, and a socket's has at most {MOST_PATH_BYTES}")]
    TooLong {
        /// The option that names it.
        option: &'static str,
        /// As given.
        path: PathBuf,
        /// Bytes of the path.
        found: usize,
    },
    /// The path cannot be used.
    #[error("{option} {path}: {error}")]
    Bind {
        /// The option that names it.
        option: &'static str,
        /// As given.
        path: PathBuf,
        /// Why not.
        error: io::Error,
    },
    /// No thread to pass a connection on.
    #[error("--fd: the connection cannot be passed on: {0}")]
    Relay(io::Error),
    /// The descriptor cannot be used.
    #[error("--fd {number}: {error}")]
    Descriptor {
        /// As given.
        number: i32,
        /// Why not.
        error: io::Error,
    },
}

/// Whether a process has a stream socket bound at `path`. It is asked for a connection of another type, which Linux
/// refuses with another errno than one that nobody is there for (`unix_find_bsd`), and which its owner does not see: a
/// real connection would be taken for a VMM's.
fn has_owner(path: &Path) -> io::Result<bool> {
    match UnixDatagram::unbound()?.connect(path) {
        Err(error) if error.raw_os_error() == Some(nix::libc::EPROTOTYPE) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => Ok(false),
        Err(error) => Err(error),
        // A datagram socket of somebody.
        Ok(()) => Ok(true),
    }
}

/// A listening socket.
#[derive(Debug)]
pub struct Socket {
    listener: UnixListener,
    path: Option<PathBuf>,
    connected: bool,
    relay: Option<(UnixStream, UnixStream)>,
}

impl Socket {
    /// Binds a new socket at the path that `option` names. One that nobody listens on is replaced.
    pub fn bind(option: &'static str, path: &Path) -> Result<Self, SocketError> {
        let directory = match path.parent() {
            Some(parent) if parent.as_os_str().is_empty() => Path::new("."),
            Some(parent) => parent,
            None => Path::new("/"),
        };
        if !directory.is_dir() {
            return Err(SocketError::Directory { option, path: path.into(), directory: directory.into() });
        }
        let found = path.as_os_str().len();
        if found > MOST_PATH_BYTES {
            return Err(SocketError::TooLong { option, path: path.into(), found });
        }
        let bind = |error: io::Error| match error.kind() {
            io::ErrorKind::PermissionDenied => SocketError::Permission {
                option,
                path: path.into(),
                directory: directory.into(),
                user: nix::unistd::geteuid().as_raw(),
            },
            _ => SocketError::Bind { option, path: path.into(), error },
        };
        match std::fs::symlink_metadata(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(bind(error)),
            Ok(found) if !found.file_type().is_socket() => {
                return Err(SocketError::NotASocket { option, path: path.into() });
            }
            Ok(_) if has_owner(path).map_err(bind)? => {
                return Err(SocketError::InUse { option, path: path.into() });
            }
            Ok(_) => std::fs::remove_file(path).map_err(bind)?,
        }
        // Under its name only when it listens, so that whoever waits for the name can connect at once.
        let mut unfinished = path.as_os_str().to_owned();
        unfinished.push(UNFINISHED);
        let listener = UnixListener::bind(&unfinished).map_err(bind)?;
        std::fs::rename(&unfinished, path).map_err(bind)?;
        Ok(Socket { listener, path: Some(path.into()), connected: false, relay: None })
    }

    /// Uses a descriptor that this process was started with. A connected one is passed on through a socket of our
    /// own, since the vhost-user machinery takes nothing but a listening one.
    pub fn inherit(number: i32) -> Result<Self, SocketError> {
        let wrong = |error: io::Error| SocketError::Descriptor { number, error };
        let descriptor = take_inherited(number).map_err(wrong)?;
        let listening = getsockopt(&descriptor, sockopt::AcceptConn).map_err(|error| wrong(error.into()))?;
        if listening {
            let listener = UnixListener::from(descriptor);
            return Ok(Socket { listener, path: None, connected: false, relay: None });
        }
        let (listener, ours) = listen_privately().map_err(wrong)?;
        let relay = Some((UnixStream::from(descriptor), ours));
        Ok(Socket { listener, path: None, connected: true, relay })
    }

    /// Begins to pass on what comes over a connected descriptor.
    pub fn start_relay(&mut self) -> Result<(), SocketError> {
        match self.relay.take() {
            Some((vmm, ours)) => relay::start(vmm, ours).map_err(SocketError::Relay),
            None => Ok(()),
        }
    }

    /// Whether there will be no second connection.
    pub fn is_connected(&self) -> bool {
        self.connected
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        if let Some(path) = &self.path
            && let Err(error) = std::fs::remove_file(path)
        {
            tracing::debug!("{}: {error}", path.display());
        }
    }
}

/// A listening socket, and the other end of the only connection that waits on it.
fn listen_privately() -> io::Result<(UnixListener, UnixStream)> {
    // Nobody else can connect: the directory is ours, and the name is gone before anything is accepted.
    let directory = nix::unistd::mkdtemp(&std::env::temp_dir().join("vhost-user-kfd-XXXXXX"))?;
    let path = directory.join("socket");
    let made = UnixListener::bind(&path).and_then(|listener| Ok((listener, UnixStream::connect(&path)?)));
    let removed = std::fs::remove_file(&path).and_then(|()| std::fs::remove_dir(&directory));
    let made = made?;
    removed?;
    Ok(made)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bad_places_are_told_apart() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        assert!(matches!(Socket::bind("--socket", &at("none/s")), Err(SocketError::Directory { .. })));
        std::fs::write(at("file"), "").unwrap();
        assert!(matches!(Socket::bind("--socket", &at("file")), Err(SocketError::NotASocket { .. })));
        let first = Socket::bind("--socket", &at("s")).unwrap();
        first.listener.set_nonblocking(true).unwrap();
        assert!(matches!(Socket::bind("--socket", &at("s")), Err(SocketError::InUse { .. })));
        assert_eq!(
            first.listener.accept().unwrap_err().kind(),
            io::ErrorKind::WouldBlock,
            "its owner sees nothing"
        );
        drop(first);
        assert!(!at("s").exists(), "the name goes with the socket");
        // A socket whose owner died without removing it.
        drop(UnixListener::bind(at("stale")).unwrap());
        assert!(Socket::bind("--socket", &at("stale")).is_ok());
        // unix(7): 108 bytes with the 0 at the end.
        let room = 107 - UNFINISHED.len() - directory.path().as_os_str().len() - 1;
        assert!(Socket::bind("--socket", &at(&"x".repeat(room))).is_ok());
        let long = Socket::bind("--socket", &at(&"x".repeat(room + 1))).unwrap_err();
        assert!(long.to_string().ends_with("a path of 104 bytes, and a socket's has at most 103"), "{long}");
    }
}
