//! SDMA packets: from words to what is to be done.

use super::ENGINE;
use crate::engine::Failure;
use crate::engine::atomic::{Operation, compare};
use crate::engine::transfer::{Rectangle, Side, Transfer};

/// Words that any packet has at most, apart from the data of a WRITE.
pub(super) const MAX_HEAD: usize = 13;

const NOP: u32 = 0;
const COPY: u32 = 1;
const WRITE: u32 = 2;
const FENCE: u32 = 5;
const TRAP: u32 = 6;
const POLL_REGMEM: u32 = 8;
const COND_EXE: u32 = 9;
const ATOMIC: u32 = 10;
const CONST_FILL: u32 = 11;
const TIMESTAMP: u32 = 13;
const GCR_REQ: u32 = 17;

const COPY_LINEAR: u32 = 0;
const COPY_LINEAR_SUB_WIND: u32 = 4;
const TIMESTAMP_GET: u32 = 1;
const TIMESTAMP_GET_GLOBAL: u32 = 2;

/// How boxes are described.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rectangles {
    /// Offsets of 14 and 11 bits, pitch of 19, slice of 28: up to gfx11.
    Gfx9,
    /// Offsets of 16 and 14 bits, pitch of 16, slice of 32.
    Gfx12,
}

/// What differs from one generation of the engine to the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Bits of the count of COPY.
    pub count_bits: u32,
    /// There is GCR_REQ, and the bits that swapped bytes are cache policies.
    pub navi: bool,
    /// The layout of boxes.
    pub rectangles: Rectangles,
}

impl Layout {
    /// The layout of a GPU, by the three parts of its `gfx_target_version` (gfx90a is 9, 0, 10).
    pub fn for_gfx(major: u32, minor: u32, stepping: u32) -> Self {
        let large_count = match major {
            0..=9 => minor >= 4 || stepping == 10,
            10 => minor >= 3,
            _ => true,
        };
        Self {
            count_bits: if large_count { 30 } else { 22 },
            navi: major >= 10,
            rectangles: if major >= 12 { Rectangles::Gfx12 } else { Rectangles::Gfx9 },
        }
    }
}

/// A packet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Decoded {
    /// Its length in words.
    pub words: u32,
    /// What it does.
    pub action: Action,
}

/// What a packet does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Action {
    /// Nothing: padding, and caches that there are not.
    Nothing,
    /// Moves memory; a broadcast has two destinations.
    Transfer([Option<Transfer>; 2]),
    /// Copies the words behind the packet's head.
    Write { to: u64, words: u32 },
    /// Stores a word after all that came before.
    Fence { va: u64, data: u32 },
    /// Raises an interrupt.
    Trap { context_id: u32 },
    /// Waits for a word.
    Poll { va: u64, function: u32, reference: u32, mask: u32 },
    /// Leaves out so many words unless the one at `va` is as it should.
    Condition { va: u64, reference: u32, words: u32 },
    /// Changes a word.
    Atomic { operation: Operation, va: u64, source: u64, compare: u64, until_equal: bool },
    /// Stores the clock.
    Timestamp { va: u64 },
}

impl Action {
    /// It is done at once, and tells somebody that all before it is.
    pub(super) fn tells(&self) -> bool {
        matches!(self, Self::Fence { .. } | Self::Trap { .. } | Self::Atomic { until_equal: false, .. })
    }
}

fn address(low: u32, high: u32) -> u64 {
    u64::from(low) | u64::from(high) << 32
}

impl Layout {
    /// Decodes the packet that starts with `head`. Words behind what was submitted are zeros there; its
    /// length says whether it was all there.
    pub(super) fn decode(&self, head: &[u32; MAX_HEAD], va: u64) -> Result<Decoded, Failure> {
        let [header, w1, w2, w3, w4, w5, w6, w7, w8, ..] = *head;
        let malformed = |problem| Failure::Malformed { engine: ENGINE, va, header, problem };
        let unknown = || Failure::Opcode { engine: ENGINE, va, header };
        let done = |words, action| Ok(Decoded { words, action });
        match (header & 0xff, header >> 8 & 0xff) {
            (NOP, 0) => done(1 + (header >> 16 & 0x3fff), Action::Nothing),
            (COPY, COPY_LINEAR) => {
                if !self.navi && w2 & 0x0303_0300 != 0 {
                    return Err(malformed("swaps bytes"));
                }
                let length = u64::from(w1 & ((1 << self.count_bits) - 1)) + 1;
                let copy = |low, high| Some(Transfer::copy(address(low, high), address(w3, w4), length));
                if header >> 27 & 1 == 1 {
                    done(9, Action::Transfer([copy(w5, w6), copy(w7, w8)]))
                } else {
                    done(7, Action::Transfer([copy(w5, w6), None]))
                }
            }
            (COPY, COPY_LINEAR_SUB_WIND) => {
                let shift = header >> 29;
                if shift > 4 {
                    return Err(malformed("elements of more than 16 bytes"));
                }
                let rectangle = self.rectangle(head, shift);
                done(13, Action::Transfer([Some(Transfer::Rectangle(rectangle)), None]))
            }
            (WRITE, 0) => {
                let words = (w3 & 0xf_ffff) + 1;
                done(4 + words, Action::Write { to: address(w1, w2), words })
            }
            (FENCE, 0) => done(4, Action::Fence { va: address(w1, w2), data: w3 }),
            (TRAP, 0) => done(2, Action::Trap { context_id: w1 & 0x0fff_ffff }),
            (POLL_REGMEM, 0) => {
                let function = header >> 28 & 7;
                let memory = header >> 31 == 1;
                let flush = header >> 26 & 1 == 1;
                if !memory && (function == 0 || flush) {
                    // HDP flush: there is no host data path to flush.
                    return done(6, Action::Nothing);
                }
                if !memory {
                    return Err(malformed("waits for a register"));
                }
                if compare(function, 0, 0).is_none() {
                    return Err(malformed("no comparison has that number"));
                }
                done(6, Action::Poll { va: address(w1, w2), function, reference: w3, mask: w4 })
            }
            (COND_EXE, 0) => {
                let words = w4 & 0x3fff;
                done(5, Action::Condition { va: address(w1, w2), reference: w3, words })
            }
            (ATOMIC, 0) => {
                let operation =
                    Operation::new(header >> 25).ok_or(malformed("no integer atomic has that number"))?;
                let action = Action::Atomic {
                    operation,
                    va: address(w1, w2),
                    source: address(w3, w4),
                    compare: address(w5, w6),
                    until_equal: header >> 16 & 1 == 1,
                };
                done(8, action)
            }
            (CONST_FILL, 0) => {
                let count = w4 & 0x3f_ffff;
                let byte = w3 & 0xff;
                let (pattern, length) = match header >> 30 {
                    0 => (byte * 0x0101_0101, count + 1),
                    1 => (w3 & 0xffff | w3 << 16, (count & !1) + 2),
                    2 => (w3, (count & !3) + 4),
                    _ => return Err(malformed("fills with units of 8 bytes")),
                };
                let fill = Transfer::fill(address(w1, w2), pattern, u64::from(length));
                done(5, Action::Transfer([Some(fill), None]))
            }
            (TIMESTAMP, TIMESTAMP_GET | TIMESTAMP_GET_GLOBAL) => {
                done(3, Action::Timestamp { va: address(w1 & !7, w2) })
            }
            (GCR_REQ, _) if self.navi => done(5, Action::Nothing),
            _ => Err(unknown()),
        }
    }

    fn rectangle(&self, head: &[u32; MAX_HEAD], shift: u32) -> Rectangle {
        let [_, w1, w2, w3, w4, w5, w6, w7, w8, w9, w10, w11, w12] = *head;
        let side = |low, high, xy: u32, z_pitch: u32, slice: u32| match self.rectangles {
            Rectangles::Gfx9 => Side {
                base: address(low, high),
                offset: [xy & 0x3fff, xy >> 16 & 0x3fff, z_pitch & 0x7ff],
                pitch: u64::from(z_pitch >> 13) + 1,
                slice: u64::from(slice & 0x0fff_ffff) + 1,
            },
            Rectangles::Gfx12 => Side {
                base: address(low, high),
                offset: [xy & 0xffff, xy >> 16, z_pitch & 0x3fff],
                pitch: u64::from(z_pitch >> 16) + 1,
                slice: u64::from(slice) + 1,
            },
        };
        let extent = match self.rectangles {
            Rectangles::Gfx9 => [w11 & 0x3fff, w11 >> 16 & 0x3fff, w12 & 0x7ff],
            Rectangles::Gfx12 => [w11 & 0xffff, w11 >> 16, w12 & 0x3fff],
        };
        Rectangle {
            from: side(w1, w2, w3, w4, w5),
            to: side(w6, w7, w8, w9, w10),
            extent: extent.map(|size| size + 1),
            shift,
            next: (0, 0),
        }
    }
}
