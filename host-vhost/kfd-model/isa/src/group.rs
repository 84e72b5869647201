//! A workgroup: its waves, LDS and barrier.

use std::sync::Arc;

use crate::bus::Bus;
use crate::code::{CodePage, Fetch};
use crate::mem::lds::Lds;
use crate::op::Encoding;
use crate::salu::control::{self, Flow};
use crate::start::Start;
use crate::stop::Stop;
use crate::wave::Wave;
use crate::{mem, salu, valu};

/// Most waves of a workgroup: 1024 work-items.
pub const MAX_WAVES: usize = 16;

/// Instructions that a wave runs before it is the next one's turn: enough to keep its registers warm, and few enough that
/// waves which wait for one another by spinning get on.
const TURN: u32 = 1024;

/// How a slice of a workgroup ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// All waves are done.
    Done,
    /// The instructions are used up.
    More,
    /// Each wave that could run asked to let others run first.
    Sleeps,
}

/// Where and why a wave stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Halt {
    /// Address of the instruction.
    pub pc: u64,
    /// Its first word; 0 if it could not be fetched.
    pub word: u32,
    /// Why.
    pub stop: Stop,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Runs,
    AtBarrier,
    Done,
}

#[derive(Debug)]
struct Member {
    wave: Wave,
    state: State,
}

/// A workgroup that runs.
#[derive(Debug, Default)]
pub struct Group {
    members: Vec<Member>,
    /// How many of them belong to the workgroup; the rest are kept for the next.
    used: usize,
    lds: Lds,
    /// Whose turn it is.
    next: usize,
    instructions: u64,
}

impl Group {
    /// Becomes a fresh workgroup; what memory it has is used again. `scratch` says how far each wave's private memory is
    /// behind that of the queue.
    pub fn begin(&mut self, start: &Start, scratch: impl Fn(u32) -> u32) {
        let waves = start.waves();
        self.used = (waves as usize).min(MAX_WAVES);
        while self.members.len() < self.used {
            self.members.push(Member { wave: Wave::new(), state: State::Done });
        }
        for (index, member) in (0..).zip(self.members.iter_mut().take(self.used)) {
            start.begin(&mut member.wave, index, scratch(index));
            member.state = State::Runs;
        }
        self.lds.reset(start.group_segment);
        self.next = 0;
        self.instructions = 0;
    }

    /// Instructions that its waves ran since it began.
    pub fn instructions(&self) -> u64 {
        self.instructions
    }

    /// Runs about `budget` instructions.
    ///
    /// # Errors
    /// What stopped one of its waves.
    pub fn run(&mut self, budget: u32, machine: &mut (impl Bus + Fetch)) -> Result<Progress, Halt> {
        let mut left = budget;
        loop {
            let mut ran = false;
            let mut awake = false;
            for _ in 0..self.used {
                let index = self.next;
                self.next = if index + 1 < self.used { index + 1 } else { 0 };
                let Some(member) = self.members.get_mut(index) else { continue };
                if member.state != State::Runs {
                    continue;
                }
                ran = true;
                let turn = TURN.min(left);
                let (count, flow) = run_wave(&mut member.wave, turn, &mut self.lds, machine)?;
                self.instructions += u64::from(count);
                left -= count.min(left);
                match flow {
                    Flow::Next => awake = true,
                    Flow::Sleep => {}
                    Flow::Barrier => {
                        member.state = State::AtBarrier;
                        awake = true;
                    }
                    Flow::End => {
                        member.state = State::Done;
                        awake = true;
                    }
                }
                if left == 0 || machine.is_exhausted() {
                    break;
                }
            }
            let mut done = true;
            let mut all_wait = true;
            for member in self.members.iter().take(self.used) {
                done &= member.state == State::Done;
                all_wait &= member.state != State::Runs;
            }
            if done {
                return Ok(Progress::Done);
            }
            if all_wait {
                for member in self.members.iter_mut().take(self.used) {
                    if member.state == State::AtBarrier {
                        member.state = State::Runs;
                    }
                }
            }
            if ran && !awake {
                return Ok(Progress::Sleeps);
            }
            if left == 0 || machine.is_exhausted() {
                return Ok(Progress::More);
            }
        }
    }
}

/// Runs at most `budget` instructions of a wave: how many it were, and how it goes on.
fn run_wave(
    wave: &mut Wave,
    budget: u32,
    lds: &mut Lds,
    machine: &mut (impl Bus + Fetch),
) -> Result<(u32, Flow), Halt> {
    let mut count = 0;
    while count < budget {
        let pc = wave.pc;
        let halt = |stop| Halt { pc, word: 0, stop };
        if !pc.is_multiple_of(4) {
            return Err(halt(Stop::Illegal));
        }
        let page = machine.page(pc).map_err(|fault| halt(fault.into()))?;
        let (ran, flow) = run_on_page(wave, budget - count, lds, machine, &page)?;
        count += ran;
        if flow != Flow::Next || machine.is_exhausted() {
            return Ok((count, flow));
        }
    }
    Ok((count, Flow::Next))
}

/// Runs until the wave leaves the page.
#[inline]
fn run_on_page(
    wave: &mut Wave,
    budget: u32,
    lds: &mut Lds,
    machine: &mut (impl Bus + Fetch),
    page: &Arc<CodePage>,
) -> Result<(u32, Flow), Halt> {
    let mut count = 0;
    // Vector instructions leave it alone: only what may read or change it finds it in the wave.
    let mut pc = wave.pc;
    while count < budget {
        let Some(decoded) = page.instruction(pc) else { break };
        let halt = |stop| Halt { pc, word: page.word(pc), stop };
        let ready = match decoded {
            Ok(ready) => ready,
            Err(error) => {
                wave.pc = pc;
                return Err(halt(undecoded(error)));
            }
        };
        let inst = &ready.inst;
        count += 1;
        let next = pc.wrapping_add(inst.bytes());
        if let Some(handler) = ready.handler
            && wave.mode.is_direct()
        {
            handler(wave, inst);
            pc = next;
            continue;
        }
        wave.pc = next;
        match inst.encoding {
            Encoding::Sopp => {
                let flow = control::execute(wave, inst, machine).map_err(halt)?;
                if flow != Flow::Next {
                    return Ok((count, flow));
                }
            }
            Encoding::Sop1 | Encoding::Sop2 | Encoding::Sopc | Encoding::Sopk => {
                salu::execute(wave, inst).map_err(halt)?;
            }
            Encoding::Smem
            | Encoding::Ds
            | Encoding::Flat
            | Encoding::Global
            | Encoding::Scratch
            | Encoding::Mubuf => match mem::execute(wave, inst, lds, machine) {
                Ok(()) if machine.is_exhausted() => return Ok((count, Flow::Next)),
                Ok(()) => {}
                Err(Stop::Wait) => {
                    wave.pc = pc;
                    return Ok((count, Flow::Sleep));
                }
                Err(stop) => return Err(halt(stop)),
            },
            _ => valu::execute(wave, inst).map_err(halt)?,
        }
        pc = wave.pc;
    }
    wave.pc = pc;
    Ok((count, Flow::Next))
}

/// What words that are no instruction, or one that is not decoded, mean for the wave.
fn undecoded(error: &crate::DecodeError) -> Stop {
    match error {
        crate::DecodeError::NotImplemented { name, .. } => Stop::NotSupported { name },
        _ => Stop::Illegal,
    }
}

#[cfg(test)]
mod tests;
