//! Streams of system management events of a GPU (`kfd_smi_events.c`).
//!
//! What the process gets is an end of a pair of sockets, since nothing else that a program can make is read, written and polled.
//! Which events it enabled is looked at when one happens, so no thread is needed. Only memory faults happen in the model.
//!
//! Deliberate differences from the kernel (Linux 6.12):
//!
//! | | kernel | here |
//! |---|---|---|
//! | a read of a stream that has nothing | `EAGAIN` always | `EAGAIN` until the program takes `O_NONBLOCK` away |
//! | a write of fewer than 8 bytes | `EFAULT` | is taken, and means nothing |
//! | a write of more | 8 are taken | all are, the last 8 count |
//! | writes without an event between | without end | some hundred, then `EAGAIN` |
//! | lines beyond 1024 bytes that nobody read | are lost | are kept, up to what a socket holds |
//! | who hears of a memory fault | before the second half of 2026 everybody | the process itself |

use std::os::fd::{AsFd, AsRawFd, IntoRawFd, OwnedFd, RawFd};
use std::sync::{Mutex, MutexGuard, PoisonError};

use kfd_abi::smi::{KFD_SMI_EVENT_VMFAULT, event_mask};
use kfd_seam::Result;
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use nix::poll::{PollFd, PollFlags, ppoll};
use nix::sys::prctl;
use nix::sys::socket::{AddressFamily, MsgFlags, SockFlag, SockType, recv, send, socketpair};
use nix::sys::time::TimeSpec;

/// Streams that a process can have of a GPU. The kernel sets no limit but descriptors.
const MAX_STREAMS: usize = 4096;

/// A thread, as the driver remembers it (`struct amdgpu_task_info`).
#[derive(Clone, Debug)]
pub struct Task {
    pid: i32,
    name: Vec<u8>,
}

impl Task {
    /// The calling thread.
    pub fn current() -> Self {
        let name = prctl::get_name().map(|name| name.to_bytes().to_vec()).unwrap_or_default();
        Self { pid: nix::unistd::gettid().as_raw(), name }
    }
}

/// The streams of a GPU.
#[derive(Debug, Default)]
pub struct Streams {
    clients: Mutex<Vec<Client>>,
    /// Who took the GPU's address space.
    task: Mutex<Option<Task>>,
}

#[derive(Debug)]
struct Client {
    socket: OwnedFd,
    /// Mask of the enabled events.
    events: u64,
}

impl Client {
    /// The program has closed its end.
    fn is_over(&self) -> bool {
        let mut polled = [PollFd::new(self.socket.as_fd(), PollFlags::empty())];
        let polled = ppoll(&mut polled, Some(TimeSpec::new(0, 0)), None).map(|_| polled);
        polled.is_ok_and(|[polled]| polled.any() == Some(true))
    }

    /// Takes what the program has written: each 8 bytes are a mask, and the last one counts.
    fn look(&mut self) {
        let mut bytes = [0; 4096];
        while let Ok(count @ 1..) = recv(self.socket.as_raw_fd(), &mut bytes, MsgFlags::MSG_DONTWAIT) {
            let masks = bytes.get(..count).unwrap_or(&bytes).as_chunks::<8>().0;
            if let Some(mask) = masks.last() {
                self.events = u64::from_ne_bytes(*mask);
            }
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Streams {
    /// The calling thread takes the address space (`amdgpu_vm_set_task_info`).
    pub fn acquired(&self) {
        *lock(&self.task) = Some(Task::current());
    }

    /// A descriptor for the program (`kfd_smi_event_open`): not closed on exec.
    ///
    /// # Errors
    /// `EMFILE`, `ENFILE`, `ENOMEM`.
    pub fn open(&self) -> Result<RawFd> {
        let mut clients = lock(&self.clients);
        clients.retain(|client| !client.is_over());
        if clients.len() >= MAX_STREAMS {
            return Err(Errno::ENOMEM);
        }
        let flags = SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC;
        let (socket, theirs) = socketpair(AddressFamily::Unix, SockType::Stream, None, flags)?;
        fcntl(&theirs, FcntlArg::F_SETFD(FdFlag::empty()))?;
        clients.push(Client { socket, events: 0 });
        Ok(theirs.into_raw_fd())
    }

    /// A memory fault (`kfd_smi_event_update_vmfault`).
    pub fn memory_fault(&self) {
        let Some(task) = lock(&self.task).clone() else { return };
        let mut line = format!("{KFD_SMI_EVENT_VMFAULT:x} {:x}:", task.pid).into_bytes();
        line.extend(task.name);
        line.push(b'\n');
        let mut clients = lock(&self.clients);
        for client in clients.iter_mut() {
            client.look();
            if client.events & event_mask(KFD_SMI_EVENT_VMFAULT) != 0 {
                // Who does not read loses lines, as in the kernel.
                let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
                let _ = send(client.socket.as_raw_fd(), &line, flags);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::FromRawFd;

    use nix::unistd::{read, write};

    use super::*;

    #[allow(unsafe_code)]
    fn open(streams: &Streams) -> OwnedFd {
        // SAFETY: the descriptor was made for this caller alone.
        unsafe { OwnedFd::from_raw_fd(streams.open().unwrap()) }
    }

    /// Lines by KFD_EVENT_FMT_VMFAULT of linux/kfd_ioctl.h.
    #[test]
    fn a_stream_has_the_faults_that_happen_while_they_are_enabled() {
        let streams = Streams::default();
        let stream = open(&streams);
        let mut buffer = [0; 64];
        streams.memory_fault();
        streams.acquired();
        streams.memory_fault();
        assert_eq!(read(&stream, &mut buffer), Err(Errno::EAGAIN), "nothing is enabled");
        write(&stream, &event_mask(3).to_ne_bytes()).unwrap();
        write(&stream, &event_mask(1).to_ne_bytes()).unwrap();
        streams.memory_fault();
        streams.memory_fault();
        write(&stream, &0u64.to_ne_bytes()).unwrap();
        streams.memory_fault();
        let name = std::fs::read_to_string("/proc/thread-self/comm").unwrap();
        let line = format!("1 {:x}:{}\n", nix::unistd::gettid().as_raw(), name.trim_end());
        let count = read(&stream, &mut buffer[..3]).unwrap();
        assert_eq!(&buffer[..count], &line.as_bytes()[..3], "a small buffer gets the beginning");
        let count = read(&stream, &mut buffer).unwrap();
        assert_eq!(std::str::from_utf8(&buffer[..count]).unwrap(), &format!("{line}{line}")[3..]);
        assert_eq!(read(&stream, &mut buffer), Err(Errno::EAGAIN));
    }

    #[test]
    fn streams_that_the_program_has_closed_are_forgotten() {
        let streams = Streams::default();
        streams.acquired();
        drop(open(&streams));
        streams.memory_fault();
        let stream = open(&streams);
        assert_eq!(lock(&streams.clients).len(), 1);
        assert_eq!(fcntl(&stream, FcntlArg::F_GETFD), Ok(0), "anon_inode_getfd(.., O_RDWR)");
    }
}
