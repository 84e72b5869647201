//! A channel to another process that never blocks: what does not fit in the socket waits in a queue.

use std::collections::VecDeque;
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kfd_ipc::supervisor::ToSupervisor;
use kfd_ipc::worker::ToWorker;
use kfd_ipc::{Channel, IpcError};
use nix::errno::Errno;
use rustix::event::epoll;
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};

/// A message that can wait.
pub trait Message {
    /// Sends it.
    fn send(&self, channel: &Channel) -> Result<(), IpcError>;
}

impl Message for ToSupervisor {
    fn send(&self, channel: &Channel) -> Result<(), IpcError> {
        channel.send(self, &[])
    }
}

/// A message to a worker.
#[derive(Debug)]
pub enum ForWorker {
    /// A request frame.
    Frame {
        /// Its ring.
        ring: u8,
        /// For the answer.
        ticket: u64,
        /// The frame.
        bytes: Vec<u8>,
    },
    /// Any other message.
    Plain(ToWorker<'static>),
    /// A message with a descriptor.
    WithFile(ToWorker<'static>, Arc<File>),
}

impl Message for ForWorker {
    fn send(&self, channel: &Channel) -> Result<(), IpcError> {
        match self {
            ForWorker::Frame { ring, ticket, bytes } => {
                channel.send(&ToWorker::Frame { ring: *ring, ticket: *ticket, bytes }, &[])
            }
            ForWorker::Plain(message) => channel.send(message, &[]),
            ForWorker::WithFile(message, file) => channel.send(message, &[file.as_fd()]),
        }
    }
}

/// One end of a channel, with what still has to be sent. Before [`Link::connect`] everything waits.
#[derive(Debug)]
pub struct Link<M> {
    channel: Option<Channel>,
    waiting: VecDeque<M>,
    starved: bool,
    watched: bool,
    holds: u32,
    /// Since when there are any.
    held_since: Option<Instant>,
    /// What was sent while it was held.
    held: VecDeque<M>,
}

impl<M> Default for Link<M> {
    fn default() -> Self {
        Link {
            channel: None,
            waiting: VecDeque::new(),
            starved: false,
            watched: false,
            holds: 0,
            held_since: None,
            held: VecDeque::new(),
        }
    }
}

fn would_block(error: &IpcError) -> bool {
    matches!(error, IpcError::System { errno: Errno::EAGAIN | Errno::ENOBUFS, .. })
}

/// Descriptors on their way are counted for each user, over all processes and VMs (unix(7), ETOOMANYREFS).
fn too_many_in_flight(error: &IpcError) -> bool {
    matches!(error, IpcError::System { errno: Errno::ETOOMANYREFS, .. })
}

impl<M: Message> Link<M> {
    /// Takes over the channel and makes it non-blocking.
    pub fn connect(&mut self, channel: Channel) -> Result<(), IpcError> {
        let system = |error: rustix::io::Errno| IpcError::System {
            call: "fcntl",
            errno: Errno::from_raw(error.raw_os_error()),
        };
        let flags = fcntl_getfl(&channel).map_err(system)?;
        fcntl_setfl(&channel, flags | OFlags::NONBLOCK).map_err(system)?;
        self.channel = Some(channel);
        Ok(())
    }

    /// The channel's descriptor.
    pub fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.channel.as_ref().map(AsFd::as_fd)
    }

    /// The channel.
    pub fn channel(&self) -> Option<&Channel> {
        self.channel.as_ref()
    }

    /// Sends a message, after those that wait.
    pub fn send(&mut self, message: M) -> Result<(), IpcError> {
        match self.holds {
            0 => self.waiting.push_back(message),
            _ => self.held.push_back(message),
        }
        self.flush()
    }

    /// Sends what waits, as far as it goes.
    pub fn flush(&mut self) -> Result<(), IpcError> {
        let Some(channel) = &self.channel else { return Ok(()) };
        self.starved = false;
        while let Some(message) = self.waiting.front() {
            match message.send(channel) {
                Ok(()) => self.waiting.pop_front(),
                Err(error) if would_block(&error) => return Ok(()),
                Err(error) if too_many_in_flight(&error) => {
                    self.starved = true;
                    return Ok(());
                }
                Err(error) => return Err(error),
            };
        }
        Ok(())
    }

    /// What is sent from now on waits until [`Link::let_go`] was called as often as this. `false`, and it changes
    /// nothing, where it is held for as long as `most` already: holds that overlap could go on without end.
    pub fn hold(&mut self, now: Instant, most: Duration) -> bool {
        let since = self.held_since.unwrap_or(now);
        if now.saturating_duration_since(since) >= most {
            return false;
        }
        self.held_since = Some(since);
        self.holds = self.holds.saturating_add(1);
        true
    }

    /// Undoes a [`Link::hold`]; flush then. Returns since when it was held, if it is not any more.
    pub fn let_go(&mut self) -> Option<Instant> {
        self.holds = self.holds.saturating_sub(1);
        if self.holds != 0 {
            return None;
        }
        self.waiting.append(&mut self.held);
        self.held_since.take()
    }

    /// Since when what is sent waits, if it does.
    pub fn held_since(&self) -> Option<Instant> {
        self.held_since
    }

    /// Puts a message before all that was sent since a [`Link::hold`]; flush then.
    pub fn put_before_held(&mut self, message: M) {
        self.waiting.push_back(message);
    }

    /// Whether something waits for room in the socket, which poll and epoll tell.
    pub fn is_waiting(&self) -> bool {
        self.channel.is_some() && !self.waiting.is_empty() && !self.starved
    }

    /// Whether a descriptor waits for others of this user to arrive. Nothing tells when they have: flush from time
    /// to time.
    pub fn is_starved(&self) -> bool {
        self.starved
    }

    /// Messages that are not sent yet.
    pub fn backlog(&self) -> usize {
        self.waiting.len().saturating_add(self.held.len())
    }

    /// Has epoll report room in the socket exactly while something waits for it.
    pub fn update_watch(&mut self, epoll: &OwnedFd, event: u64) -> std::io::Result<()> {
        let waiting = self.is_waiting();
        if let Some(channel) = &self.channel
            && waiting != self.watched
        {
            let mut flags = epoll::EventFlags::IN;
            flags.set(epoll::EventFlags::OUT, waiting);
            epoll::modify(epoll, channel, epoll::EventData::new_u64(event), flags)?;
            self.watched = waiting;
        }
        Ok(())
    }
}

/// Receives a message if there is one.
pub fn receive<'b, M: serde::Deserialize<'b>>(
    channel: &Channel,
    buffer: &'b mut [u8],
) -> Result<Option<(M, Vec<OwnedFd>)>, IpcError> {
    match channel.receive(buffer) {
        Ok(message) => Ok(Some(message)),
        Err(error) if would_block(&error) => Ok(None),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use kfd_ipc::MAX_MESSAGE_BYTES;

    use super::*;

    #[test]
    fn a_reader_that_sleeps_does_not_block_the_sender_and_nothing_is_lost() {
        let (ours, theirs) = Channel::pair().unwrap();
        let mut link = Link::default();
        let frame = |ticket| ForWorker::Frame { ring: 0, ticket, bytes: vec![ticket as u8; 100_000] };
        link.send(frame(0)).unwrap();
        link.connect(ours).unwrap();
        for ticket in 1..20 {
            link.send(frame(ticket)).unwrap();
        }
        assert!(link.is_waiting());
        let mut buffer = vec![0; MAX_MESSAGE_BYTES];
        for expected in 0..20 {
            link.flush().unwrap();
            match theirs.receive::<ToWorker>(&mut buffer).unwrap().0 {
                ToWorker::Frame { ticket, bytes, .. } => {
                    assert_eq!((ticket, bytes[0], bytes.len()), (expected, expected as u8, 100_000));
                }
                other => panic!("{other:?}"),
            }
        }
        assert!(!link.is_waiting());
    }

    #[test]
    fn what_is_sent_to_a_held_link_waits_for_what_is_put_before_it() {
        let (ours, theirs) = Channel::pair().unwrap();
        let mut link = Link::default();
        let start = |worker| ToSupervisor::Start { worker };
        link.send(start(1)).unwrap();
        let (now, most) = (Instant::now(), Duration::from_secs(1));
        assert!(link.hold(now, most));
        assert!(link.hold(now + most / 2, most));
        assert!(!link.hold(now + most, most), "for too long already");
        link.send(start(4)).unwrap();
        link.connect(ours).unwrap();
        link.flush().unwrap();
        link.put_before_held(start(2));
        assert_eq!(link.let_go(), None);
        link.flush().unwrap();
        assert_eq!(link.backlog(), 1, "held twice");
        link.put_before_held(start(3));
        assert_eq!((link.let_go(), link.held_since()), (Some(now), None));
        assert!(link.hold(now + most, most), "anew");
        link.let_go();
        link.send(start(5)).unwrap();
        assert_eq!(link.backlog(), 0);
        let mut buffer = vec![0; MAX_MESSAGE_BYTES];
        for expected in 1..=5 {
            let message = theirs.receive::<ToSupervisor>(&mut buffer).unwrap().0;
            assert_eq!(message, start(expected));
        }
    }

    #[test]
    fn descriptors_on_their_way_are_waited_for() {
        /// Cannot be sent as often as this.
        struct Stuck(std::cell::Cell<u32>);
        impl Message for Stuck {
            fn send(&self, channel: &Channel) -> Result<(), IpcError> {
                match self.0.get().checked_sub(1) {
                    Some(left) => {
                        self.0.set(left);
                        Err(IpcError::System { call: "sendmsg", errno: Errno::ETOOMANYREFS })
                    }
                    None => channel.send(&ToSupervisor::Start { worker: 7 }, &[]),
                }
            }
        }
        let (ours, theirs) = Channel::pair().unwrap();
        let mut link = Link::default();
        link.connect(ours).unwrap();
        link.send(Stuck(std::cell::Cell::new(2))).unwrap();
        assert!(
            link.is_starved() && !link.is_waiting(),
            "the socket has room, so it would be reported at once"
        );
        link.flush().unwrap();
        assert_eq!((link.is_starved(), link.backlog()), (true, 1));
        link.flush().unwrap();
        assert_eq!((link.is_starved(), link.backlog()), (false, 0));
        let mut buffer = vec![0; MAX_MESSAGE_BYTES];
        assert!(matches!(theirs.receive(&mut buffer).unwrap().0, ToSupervisor::Start { worker: 7 }));
    }
}
