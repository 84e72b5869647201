//! Descriptor chains: what the guest put on a virtqueue, checked once and copied out of its memory.

use std::sync::Arc;

use thiserror::Error;
use virtio_kfd_protocol::version::Capset;
use virtio_queue::DescriptorChain;
use vm_memory::{Bytes, GuestAddress, GuestMemory, GuestMemoryMmap, Permissions};

use crate::command::Header;

/// The guest's memory, without what the device itself mapped into the guest.
pub type Ram = GuestMemoryMmap<()>;

/// Device-writable bytes of a chain that are remembered while the command is in flight: the longest response fits,
/// and a guest cannot have a table of 65,535 buffers kept for each command.
const KEPT_BYTES: u64 = 256;
const _: () = assert!((size_of::<Header>() + size_of::<Capset>()) as u64 <= KEPT_BYTES);

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

    /// Bytes of the device-writable descriptors.
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

#[cfg(test)]
impl<'a> Input<'a> {
    /// The first `len` bytes of memory.
    pub(crate) fn first(ram: &'a Ram, len: u32) -> Self {
        let parts = vec![Part { address: GuestAddress(0), len }];
        Input { ram, parts, next: 0, skip: 0, remaining: len.into() }
    }
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
            // No buffer is empty, so that the bytes bound the buffers.
            if to_write < KEPT_BYTES {
                writable.push(part);
            }
            to_write = to_write.saturating_add(len.into());
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

#[cfg(test)]
mod tests {
    use virtio_queue::{Queue, QueueOwnedT, QueueT};

    use super::*;

    const NEXT: u16 = 1;
    const WRITE: u16 = 2;
    const INDIRECT: u16 = 4;

    /// A descriptor as it stands in memory (virtio 1.3, section 2.7.5).
    fn desc(addr: u64, len: u32, flags: u16, next: u16) -> [u8; 16] {
        let value =
            u128::from(addr) | u128::from(len) << 64 | u128::from(flags) << 96 | u128::from(next) << 112;
        value.to_le_bytes()
    }

    #[test]
    fn a_long_list_of_buffers_is_not_kept() {
        const TABLE: u64 = 0x20_0000;
        const BUFFER: u64 = 0x10_0000;
        let count = 60_000u16;
        let ram = Arc::new(Ram::from_ranges(&[(GuestAddress(0), 4 << 20)]).unwrap());
        let put = |at: u64, bytes: &[u8]| ram.write_slice(bytes, GuestAddress(at)).unwrap();
        put(TABLE, &desc(BUFFER, 24, NEXT, 1));
        for index in 1..count {
            let next = if index + 1 < count { NEXT } else { 0 };
            put(TABLE + u64::from(index) * 16, &desc(BUFFER + u64::from(index), 1, WRITE | next, index + 1));
        }
        // The queue: descriptors at 0x1000, available ring at 0x2000 with one chain, used ring at 0x3000.
        put(0x1000, &desc(TABLE, u32::from(count) * 16, INDIRECT, 0));
        put(0x2000, &[0, 0, 1, 0, 0, 0]);
        let mut queue = Queue::new(16).unwrap();
        queue.set_desc_table_address(Some(0x1000), None);
        queue.set_avail_ring_address(Some(0x2000), None);
        queue.set_used_ring_address(Some(0x3000), None);
        queue.set_ready(true);
        let chain = queue.iter(ram.clone()).unwrap().next().unwrap();

        let (input, output) = open(&ram, chain).unwrap();
        assert_eq!((input.remaining(), output.capacity()), (24, u64::from(count) - 1));
        assert!(output.parts.capacity() <= 512, "{} parts", output.parts.capacity());
        let response: Vec<u8> = (0..88).collect();
        assert_eq!(output.write(&ram, &response), 88);
        let mut written = [0; 89];
        ram.read_slice(&mut written, GuestAddress(BUFFER + 1)).unwrap();
        assert_eq!((&written[..88], written[88]), (&response[..], 0));
    }
}
