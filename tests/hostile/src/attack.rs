//! The list of attacks. Each says how much it sent and what the host made of it; what the host accepted although it must
//! not is an error.

mod areas;
mod blobs;
mod calls;
mod frames;
mod ioctls;
mod machine;
mod metadata;
mod runtimes;
mod streams;

use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result, anyhow, bail};

use crate::neighbour;
use crate::random::Random;
use crate::raw::{Outcome, Raw};

/// What one attack came to.
#[derive(Debug, Default)]
pub struct Report {
    /// Tries.
    sent: u64,
    /// Answered with an error.
    refused: u64,
    /// Without an answer: the context has ended, or the driver in the guest refused.
    ended: u64,
    /// Answered with success where that is allowed.
    done: u64,
    /// What the host must not have accepted.
    accepted: Vec<String>,
}

impl Report {
    /// Counts an outcome that may be anything but a hang.
    pub fn any(&mut self, outcome: &Outcome) {
        self.sent += 1;
        match outcome {
            Outcome::Answered(_) if outcome.anything_done() => self.done += 1,
            Outcome::Answered(_) => self.refused += 1,
            Outcome::Silent | Outcome::Lost => self.ended += 1,
        }
    }

    /// Counts an outcome that must not be a success.
    pub fn must_fail(&mut self, what: impl FnOnce() -> String, outcome: &Outcome) {
        self.any(outcome);
        if outcome.anything_done() {
            self.accepted.push(what());
        }
    }

    /// Counts a call outside of frames that must not be a success.
    pub fn must_err<T, E>(&mut self, what: impl FnOnce() -> String, result: &Result<T, E>) {
        self.sent += 1;
        match result {
            Ok(_) => self.accepted.push(what()),
            Err(_) => self.refused += 1,
        }
    }
}

/// A connection that is made anew when the host has ended it.
pub struct Connection {
    raw: Option<Raw>,
    reconnects: u64,
}

impl Connection {
    pub fn new() -> Self {
        Connection { raw: None, reconnects: 0 }
    }

    pub fn get(&mut self) -> Result<&mut Raw> {
        if self.raw.is_none() {
            self.reconnects += 1;
            self.raw = Some(Raw::connect().context("connect again after an attack")?);
        }
        self.raw.as_mut().context("no connection")
    }

    pub fn forget(&mut self) {
        self.raw = None;
    }
}

type Attack = fn(&mut Random, u64, &mut Report) -> Result<()>;

const ATTACKS: &[(&str, Attack)] = &[
    ("random bytes", frames::random_bytes),
    ("random requests", frames::random_requests),
    ("wrong lengths", frames::wrong_lengths),
    ("call numbers 0 to 0x400", frames::call_numbers),
    ("frames before the greeting", frames::before_the_greeting),
    ("answer memory", areas::answer_memory),
    ("unknown buffers", calls::unknown_buffers),
    ("impossible buffers", calls::impossible_buffers),
    ("events of others", calls::events_of_others),
    ("impossible waits", calls::impossible_waits),
    ("runtimes and save areas", runtimes::areas),
    ("heads of save areas", runtimes::heads),
    ("streams of others", streams::of_others),
    ("waits for streams", streams::waits),
    ("metadata of buffers", metadata::all),
    ("impossible blobs", blobs::impossible),
    ("host blobs of unknown buffers", blobs::unknown_buffers),
    ("fragmented guest blob", blobs::fragmented),
    ("600 blob maps", blobs::many_maps),
    ("many guest blobs", blobs::many),
    ("ioctls of the driver", ioctls::nonsense),
    ("more contexts than allowed", frames::many_contexts),
];

/// Runs them all, or the one of that name, with a neighbour beside them.
pub fn run(seed: u64, frames: u64, only: Option<&str>) -> Result<()> {
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let neighbour = scope.spawn(|| neighbour::watch(&done, || Ok(())));
        let attacked = all(seed, frames, only);
        done.store(true, Ordering::Release);
        let rounds = neighbour.join().map_err(|_| anyhow!("the neighbour panicked"))?;
        attacked?;
        println!("neighbour: {} rounds, all answers right", rounds.context("the neighbour")?);
        Ok(())
    })
}

fn all(seed: u64, frames: u64, only: Option<&str>) -> Result<()> {
    let mut accepted = Vec::new();
    let mut sent = 0;
    for (number, (name, attack)) in (0u64..).zip(ATTACKS) {
        if only.is_some_and(|only| only != *name) {
            continue;
        }
        let mut report = Report::default();
        attack(&mut Random::new(seed.wrapping_add(number)), frames, &mut report)
            .with_context(|| format!("attack {name:?} after {} tries", report.sent))?;
        println!(
            "{name}: {} sent, {} refused, {} ended, {} done",
            report.sent, report.refused, report.ended, report.done
        );
        sent += report.sent;
        if report.sent == 0 {
            accepted.push(format!("{name}: nothing was sent"));
        }
        accepted.extend(report.accepted.into_iter().take(20).map(|what| format!("{name}: {what}")));
        // Whatever happened to its contexts, the process can have a new one.
        Raw::connect().and_then(|mut raw| raw.alive()).with_context(|| format!("after attack {name:?}"))?;
    }
    if !accepted.is_empty() {
        bail!("the host accepted what it must refuse:\n{}", accepted.join("\n"));
    }
    println!("attack: {sent} tries, none accepted");
    Ok(())
}
