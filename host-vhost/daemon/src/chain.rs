//! Descriptor chains: what the guest put on a virtqueue, checked once and copied out of its memory.

use std::sync::Arc;

use thiserror::Error;
use virtio_queue::DescriptorChain;
use vm_memory::{Bytes, GuestAddress, GuestMemory, GuestMemoryMmap, Permissions};

/// The guest's memory, without what the device itself mapped into the guest.
pub type Ram = GuestMemoryMmap<()>;

/// Why a chain is given back unused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum ChainError {
    /// A loop, a descriptor outside the table, an unreadable table, a table in a table.
    #[error("descriptor chain: after {descriptors} descriptors there is no valid next one")]
    Broken {
        /// Descriptors that could be read.
        descriptors: usize,
    },
    /// A device-readable descriptor after a device-writable one.
    #[error("descriptor chain: descriptor {index} is device-readable and follows a device-writable one")]
    Order {
        /// Its place in the chain.
        index: usize,
    },
    /// A buffer of length 0.
    #[error("descriptor chain: descriptor {index} has length 0")]
    Empty {
        /// Its place in the chain.
        index: usize,
    },
    /// A buffer that is not in the guest's memory.
    #[error("descriptor chain: buffer {address:#x}, {len} bytes, is not in the guest's memory")]
    Outside {
        /// Guest-physical address.
        address: u64,
        /// Bytes.
        len: u32,
    },
    /// Less to read than the command needs.
    #[error("descriptor chain: {expected} bytes expected, {found} are there")]
    Short {
        /// Bytes needed.
        expected: usize,
        /// Bytes left.
        found: u64,
    },
}

/// A buffer of a chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Part {
    address: GuestAddress,
    len: u32,
}

/// The device-writable part of a chain, to be filled and given back once.
#[derive(Debug, Default)]
pub struct Output {
    head: u16,
    parts: Vec<Part>,
    capacity: u64,
}

impl Output {
    /// Index of the chain's first descriptor, by which it is given back.
    pub fn head(&self) -> u16 {
        self.head
    }

    /// Bytes that can be written.
    pub fn capacity(&self) -> u64 {
        self.capacity
    }

    /// Writes as much of `bytes` as there is room for. Returns the bytes written; 0 if the memory is not there
    /// any more.
    pub fn write(&self, ram: &Ram, bytes: &[u8]) -> u32 {
        let mut rest = bytes;
        let mut written = 0u32;
        for part in &self.parts {
            let (now, later) = rest.split_at_checked(part.len as usize).unwrap_or((rest, &[]));
            if now.is_empty() {
                break;
            }
            if ram.write_slice(now, part.address).is_err() {
                return 0;
            }
            written = written.saturating_add(u32::try_from(now.len()).unwrap_or(0));
            rest = later;
        }
        written
    }
}

/// The device-readable part of a chain. Each byte is read once.
#[derive(Debug)]
pub struct Input<'a> {
    ram: &'a Ram,
    parts: Vec<Part>,
    next: usize,
    skip: u32,
    remaining: u64,
}

impl Input<'_> {
    /// Bytes not read yet.
    pub fn remaining(&self) -> u64 {
        self.remaining
    }

    /// Fills `buffer`.
    pub fn read_exact(&mut self, buffer: &mut [u8]) -> Result<(), ChainError> {
        let short = ChainError::Short { expected: buffer.len(), found: self.remaining };
        if buffer.len() as u64 > self.remaining {
            return Err(short);
        }
        let mut rest = buffer;
        while !rest.is_empty() {
            let part = self.parts.get(self.next).ok_or(short)?;
            let left = part.len.saturating_sub(self.skip);
            let take = rest.len().min(left as usize);
            let outside = ChainError::Outside { address: part.address.0, len: part.len };
            let from = part.address.0.checked_add(self.skip.into()).ok_or(outside)?;
            let (now, later) = rest.split_at_mut_checked(take).ok_or(short)?;
            self.ram.read_slice(now, GuestAddress(from)).map_err(|_| outside)?;
            rest = later;
            self.remaining = self.remaining.saturating_sub(take as u64);
            self.skip = self.skip.saturating_add(u32::try_from(take).unwrap_or(u32::MAX));
            if self.skip >= part.len {
                self.next = self.next.saturating_add(1);
                self.skip = 0;
            }
        }
        Ok(())
    }

    /// Reads a structure.
    pub fn read<T: zerocopy::FromBytes + zerocopy::IntoBytes>(&mut self) -> Result<T, ChainError> {
        let mut value = T::new_zeroed();
        self.read_exact(value.as_mut_bytes())?;
        Ok(value)
    }
}

/// Walks a chain and checks it. The first error is in the chain's form; what is returned beside it is enough to
/// give the chain back.
pub fn open<'a>(ram: &'a Ram, chain: DescriptorChain<Arc<Ram>>) -> Result<(Input<'a>, Output), ChainError> {
    let head = chain.head_index();
    let (mut readable, mut writable) = (Vec::new(), Vec::new());
    let (mut to_read, mut to_write) = (0u64, 0u64);
    let mut complete = false;
    let mut index = 0usize;
    // The iterator ends without an error at a loop, a bad index or an unreadable table; then the last
    // descriptor that it gave still says that another one follows.
    for descriptor in chain {
        let len = descriptor.len();
        if len == 0 {
            return Err(ChainError::Empty { index });
        }
        let part = Part { address: descriptor.addr(), len };
        let access = if descriptor.is_write_only() {
            to_write = to_write.saturating_add(len.into());
            writable.push(part);
            Permissions::Write
        } else {
            if !writable.is_empty() {
                return Err(ChainError::Order { index });
            }
            to_read = to_read.saturating_add(len.into());
            readable.push(part);
            Permissions::Read
        };
        if !ram.check_range(part.address, len as usize, access) {
            return Err(ChainError::Outside { address: part.address.0, len });
        }
        complete = !descriptor.has_next();
        index = index.saturating_add(1);
    }
    if !complete {
        return Err(ChainError::Broken { descriptors: index });
    }
    let input = Input { ram, parts: readable, next: 0, skip: 0, remaining: to_read };
    Ok((input, Output { head, parts: writable, capacity: to_write }))
}
