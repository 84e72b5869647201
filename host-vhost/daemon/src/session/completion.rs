//! Commands in flight, and the order in which they complete.
//!
//! A fence on a timeline completes everything before it in the guest's driver, so a fenced command is given back
//! only when those before it on the same timeline are done. A timeline is a ring of a context, or, for commands
//! without a ring, the device.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};

use crate::chain::Output;
use crate::command::{Command, FLAG_FENCE, FLAG_RING_IDX, Header, Response};

/// A command in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Token(u64);

impl Token {
    /// No command: finishing it does nothing.
    pub(super) const NONE: Token = Token(0);
}

type Timeline = Option<(u32, u8)>;

#[derive(Debug)]
struct InFlight {
    header: Header,
    output: Output,
    done: Option<Response>,
}

/// A command that can be given back to the guest.
#[derive(Debug)]
pub struct Completed {
    /// Where the response goes.
    pub output: Output,
    /// The response.
    pub bytes: Vec<u8>,
}

/// All commands in flight.
#[derive(Debug, Default)]
pub struct Commands {
    last: u64,
    in_flight: HashMap<Token, InFlight>,
    timelines: HashMap<Timeline, VecDeque<Token>>,
    completed: Vec<Completed>,
    /// Frames in flight of each context that has any.
    frames: HashMap<u32, usize>,
}

fn timeline(header: &Header) -> Option<Timeline> {
    let on_ring = header.flags & FLAG_RING_IDX != 0;
    (header.flags & FLAG_FENCE != 0).then(|| on_ring.then_some((header.ctx_id, header.ring_idx)))
}

fn is_frame(header: &Header) -> bool {
    matches!(Command::from_number(header.kind), Command::Submit3d)
}

impl Commands {
    /// Takes in a command.
    pub fn begin(&mut self, header: Header, output: Output) -> Token {
        self.last = self.last.wrapping_add(1);
        let token = Token(self.last);
        if let Some(timeline) = timeline(&header) {
            self.timelines.entry(timeline).or_default().push_back(token);
        }
        if is_frame(&header) {
            let frames = self.frames.entry(header.ctx_id).or_default();
            *frames = frames.saturating_add(1);
        }
        self.in_flight.insert(token, InFlight { header, output, done: None });
        token
    }

    /// Frames of a context that are not given back yet, answered ones included.
    pub fn frames(&self, context: u32) -> usize {
        self.frames.get(&context).copied().unwrap_or(0)
    }

    /// Context and ring of each frame that is not given back yet.
    pub fn frame_rings(&self) -> impl Iterator<Item = (u32, u8)> {
        let frames = self.in_flight.values().filter(|command| is_frame(&command.header));
        frames.map(|command| (command.header.ctx_id, command.header.ring_idx))
    }

    /// Commands that are not given back yet.
    pub fn len(&self) -> usize {
        self.in_flight.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.in_flight.is_empty()
    }

    /// A command is done. It is given back now, or once those before it on its timeline are.
    pub fn finish(&mut self, token: Token, response: Response) {
        let Some(command) = self.in_flight.get_mut(&token) else { return };
        let Some(timeline) = timeline(&command.header) else {
            self.emit(token, response);
            return;
        };
        command.done.get_or_insert(response);
        while let Some(&first) = self.timelines.get(&timeline).and_then(VecDeque::front) {
            let Some(response) = self.in_flight.get(&first).map(|command| command.done) else { break };
            let Some(response) = response else { break };
            if let Some(queue) = self.timelines.get_mut(&timeline) {
                queue.pop_front();
            }
            self.emit(first, response);
        }
        if self.timelines.get(&timeline).is_some_and(VecDeque::is_empty) {
            self.timelines.remove(&timeline);
        }
    }

    fn emit(&mut self, token: Token, response: Response) {
        if let Some(InFlight { header, output, .. }) = self.in_flight.remove(&token) {
            if is_frame(&header)
                && let Entry::Occupied(mut frames) = self.frames.entry(header.ctx_id)
            {
                *frames.get_mut() = frames.get().saturating_sub(1);
                if *frames.get() == 0 {
                    frames.remove();
                }
            }
            self.completed.push(Completed { output, bytes: response.bytes(&header) });
        }
    }

    /// Ends everything that is still in flight, in the order in which it came.
    pub fn finish_all(&mut self, response: Response) {
        let mut tokens: Vec<Token> = self.in_flight.keys().copied().collect();
        tokens.sort_unstable();
        for token in tokens {
            self.finish(token, response);
        }
    }

    /// What can be given back.
    pub fn take_completed(&mut self) -> Vec<Completed> {
        std::mem::take(&mut self.completed)
    }
}

#[cfg(test)]
mod tests {
    use zerocopy::FromBytes;

    use super::*;

    fn fenced(ctx_id: u32, ring_idx: u8, fence_id: u64) -> Header {
        Header { flags: FLAG_FENCE | FLAG_RING_IDX, ctx_id, ring_idx, fence_id, ..Header::default() }
    }

    fn fences(commands: &mut Commands) -> Vec<u64> {
        let header = |done: &Completed| Header::read_from_prefix(&done.bytes).unwrap().0;
        commands.take_completed().iter().map(|done| header(done).fence_id).collect()
    }

    #[test]
    fn order_holds_on_a_ring_and_rings_are_independent() {
        let mut commands = Commands::default();
        let a1 = commands.begin(fenced(1, 0, 1), Output::default());
        let b1 = commands.begin(fenced(1, 1, 2), Output::default());
        let a2 = commands.begin(fenced(1, 0, 3), Output::default());
        let c1 = commands.begin(fenced(2, 0, 4), Output::default());
        commands.finish(a2, Response::Ok);
        assert!(fences(&mut commands).is_empty());
        commands.finish(c1, Response::Ok);
        commands.finish(b1, Response::Ok);
        assert_eq!(fences(&mut commands), [4, 2]);
        commands.finish(a1, Response::Ok);
        assert_eq!(fences(&mut commands), [1, 3]);
        assert!(commands.is_empty() && commands.timelines.is_empty() && commands.frames.is_empty());
    }

    #[test]
    fn commands_without_a_fence_wait_for_nobody() {
        let mut commands = Commands::default();
        let _blocked = commands.begin(fenced(1, 0, 1), Output::default());
        let plain = commands.begin(Header { fence_id: 9, ..Header::default() }, Output::default());
        commands.finish(plain, Response::Ok);
        assert_eq!(fences(&mut commands), [9]);
        commands.finish_all(Response::Unspecified);
        assert_eq!(fences(&mut commands), [1]);
    }
}
