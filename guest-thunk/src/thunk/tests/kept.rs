//! Descriptors that stay open for this library: whoever keeps the program from closing them knows of all.

use std::cell::RefCell;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::{Arc, Mutex};

use hsakmt_abi::queue::HsaQueueType;
use virtio_kfd_protocol::calls::OpenSmi;
use virtio_kfd_protocol::{GpuId, Request, SmiStream, Status};

use super::kfd::Kfd;
use super::queue::can_trap;
use crate::client::Client;
use crate::client::tests::host::{FakeHost, Fate, answer_with};
use crate::thunk::smi::Smi;
use crate::transport::own::{Keeper, keep_by};

thread_local! {
    /// Descriptors that this thread has opened, and what the kernel calls them.
    static OPENED: RefCell<Vec<(RawFd, String)>> = const { RefCell::new(Vec::new()) };
}

/// Those whose end was told.
static CLOSED: Mutex<Vec<RawFd>> = Mutex::new(Vec::new());

fn opened(descriptor: OwnedFd) -> OwnedFd {
    let raw = descriptor.as_raw_fd();
    let name = std::fs::read_link(format!("/proc/self/fd/{raw}")).unwrap();
    // Without the number of a socket.
    let name = name
        .to_str()
        .unwrap()
        .trim_end_matches(|letter: char| letter.is_ascii_digit() || "[]".contains(letter))
        .to_owned();
    OPENED.with_borrow_mut(|opened| opened.push((raw, name)));
    descriptor
}

fn closing(fd: RawFd) {
    CLOSED.lock().unwrap().push(fd);
}

/// What `act` opens.
fn opened_by(act: impl FnOnce()) -> Vec<(RawFd, String)> {
    // The first keeper of a process stays.
    keep_by(Keeper { opened, closing });
    OPENED.take();
    act();
    OPENED.take()
}

fn names(opened: &[(RawFd, String)]) -> Vec<&str> {
    opened.iter().map(|(_, name)| name.as_str()).collect()
}

#[test]
fn the_watchers() {
    if !can_trap() {
        return;
    }
    let kfd = Kfd::new();
    kfd.thunk
        .queues
        .create(
            &kfd.thunk.memory,
            kfd.thunk.host(&kfd.thunk.snapshot().unwrap()),
            kfd.new_queue(HsaQueueType::SDMA),
        )
        .unwrap();
    let opened = opened_by(|| kfd.thunk.queues.watch(&kfd.thunk));
    assert_eq!(names(&opened), ["anon_inode:[userfaultfd", "anon_inode:[eventfd"]);
    kfd.thunk.shut_down();
    let closed = CLOSED.lock().unwrap();
    assert!(opened.iter().all(|(fd, _)| closed.contains(fd)), "{opened:?} {closed:?}");
}

#[test]
fn those_of_streams_of_events() {
    let host = FakeHost::new(|_, frame| {
        Fate::Answer(answer_with(frame, |request, answer| match Request::decode(request).unwrap() {
            Request::OpenSmi { .. } => {
                answer.push::<OpenSmi>(&request.header, &SmiStream { stream: 5, pad: 0 }, &[]);
            }
            _ => answer.push_status(request.header.opcode, Status::NOT_SUPPORTED, 0),
        }))
    });
    let client = Arc::new(Client::over(Box::new(host)).unwrap());
    let smi = Smi::default();
    let mut theirs = None;
    let opened = opened_by(|| theirs = smi.open(&client, GpuId(77)).ok());
    assert_eq!(names(&opened), ["socket:", "anon_inode:[eventfd"]);
    let theirs = theirs.unwrap();
    assert!(opened.iter().all(|(fd, _)| *fd != theirs.as_raw_fd()), "the program's own");
}
