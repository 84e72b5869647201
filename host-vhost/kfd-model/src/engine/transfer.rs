//! Copies and fills that take several steps, so that a queue can be stopped in the middle of a large one.

use super::memory::{at, overlaps_backwards};
use super::{Context, Failure};

/// Bytes that one step moves at most (a row of a rectangle is moved whole, 256 KiB at most).
const PIECE: u64 = 1 << 20;

/// Rows that one step moves at most.
const ROWS: u32 = 4096;

/// What is being moved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Transfer {
    /// A linear copy.
    Copy {
        /// GPU address of the destination.
        to: u64,
        /// GPU address of the source.
        from: u64,
        /// Bytes.
        length: u64,
        /// Bytes that were moved.
        done: u64,
    },
    /// A fill with a pattern of 4 bytes.
    Fill {
        /// GPU address.
        to: u64,
        /// The pattern.
        pattern: u32,
        /// Bytes.
        length: u64,
        /// Bytes that were written.
        done: u64,
    },
    /// A copy of a box.
    Rectangle(Rectangle),
}

/// One side of a copy of a box: all numbers in elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Side {
    /// GPU address of the surface.
    pub base: u64,
    /// Where the box starts.
    pub offset: [u32; 3],
    /// From row to row.
    pub pitch: u64,
    /// From slice to slice.
    pub slice: u64,
}

impl Side {
    fn row(&self, y: u32, z: u32, shift: u32) -> Result<u64, Failure> {
        let [x0, y0, z0] = self.offset.map(u64::from);
        // At most 2^15 rows or slices with pitches below 2^33, of elements of 2^4 bytes: 2^53.
        let slices = (z0 + u64::from(z)).saturating_mul(self.slice);
        let rows = (y0 + u64::from(y)).saturating_mul(self.pitch);
        at(self.base, slices.saturating_add(rows).saturating_add(x0) << shift)
    }
}

/// A copy of a box between two linear surfaces.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Rectangle {
    /// Destination.
    pub to: Side,
    /// Source.
    pub from: Side,
    /// Size of the box in elements: at least 1 in each direction.
    pub extent: [u32; 3],
    /// An element is `1 << shift` bytes.
    pub shift: u32,
    /// The next row: y, z.
    pub next: (u32, u32),
}

impl Transfer {
    pub(super) fn copy(to: u64, from: u64, length: u64) -> Self {
        Self::Copy { to, from, length, done: 0 }
    }

    pub(super) fn fill(to: u64, pattern: u32, length: u64) -> Self {
        Self::Fill { to, pattern, length, done: 0 }
    }

    /// Moves a piece; true once all of it was moved.
    pub(super) fn advance(&mut self, context: &Context<'_>) -> Result<bool, Failure> {
        match self {
            Self::Copy { to, from, length, done } => {
                let piece = (*length - *done).min(PIECE);
                let backwards = overlaps_backwards(*to, *from, *length);
                let offset = if backwards { *length - *done - piece } else { *done };
                context.memory.copy(at(*to, offset)?, at(*from, offset)?, piece)?;
                *done += piece;
                Ok(done == length)
            }
            Self::Fill { to, pattern, length, done } => {
                let piece = (*length - *done).min(PIECE);
                context.memory.fill(at(*to, *done)?, *pattern, piece)?;
                *done += piece;
                Ok(done == length)
            }
            Self::Rectangle(rectangle) => rectangle.advance(context),
        }
    }
}

impl Rectangle {
    fn advance(&mut self, context: &Context<'_>) -> Result<bool, Failure> {
        let [width, height, depth] = self.extent;
        let bytes = u64::from(width) << self.shift;
        let (mut moved, mut rows) = (0u64, 0);
        while moved < PIECE && rows < ROWS {
            let (y, z) = self.next;
            if z >= depth {
                return Ok(true);
            }
            context.memory.copy(self.to.row(y, z, self.shift)?, self.from.row(y, z, self.shift)?, bytes)?;
            self.next = if y + 1 < height { (y + 1, z) } else { (0, z + 1) };
            moved = moved.saturating_add(bytes);
            rows += 1;
        }
        let (_, z) = self.next;
        Ok(z >= depth)
    }
}
