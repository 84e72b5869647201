//! The page of slots that the kernel makes for a process that creates an event without a buffer for them: a thunk does so before it has
//! read the topology. GPUs with memory of their own cannot reach it, natively neither, so no slot is ever written: each map of it is memory
//! of its own that looks like it.

use std::fs::File;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};

use kfd_abi::event::EVENT_PAGE_SIZE;
use kfd_seam::{MapRequest, MapSource, Result};
use nix::errno::Errno;
use nix::sys::memfd::{MFdFlags, memfd_create};

/// Whether there is a page.
#[derive(Debug, Default)]
pub struct EventPage {
    begun: AtomicBool,
}

impl EventPage {
    /// An event was created without a buffer (`allocate_event_notification_slot()`).
    pub fn begin(&self) {
        self.begun.store(true, Ordering::Release);
    }

    /// What a map of it shows, with the kernel's refusals (`kfd_event_mmap()`).
    pub fn show(&self, request: &MapRequest) -> Result<MapSource> {
        if !self.begun.load(Ordering::Acquire) || request.length > EVENT_PAGE_SIZE {
            return Err(Errno::EINVAL);
        }
        let mut memory = File::from(memfd_create(c"kfd-events", MFdFlags::MFD_CLOEXEC)?);
        let bytes = usize::try_from(EVENT_PAGE_SIZE).map_err(|_| Errno::EINVAL)?;
        // UNSIGNALED_EVENT_SLOT
        memory.write_all(&vec![0xff; bytes]).map_err(|_| Errno::ENOMEM)?;
        Ok(MapSource { file: OwnedFd::from(memory), offset: 0 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(length: u64) -> MapRequest {
        MapRequest { offset: 0, length, protection: libc::PROT_READ, flags: libc::MAP_SHARED }
    }

    #[test]
    fn there_is_a_page_when_an_event_wants_it() {
        let page = EventPage::default();
        assert_eq!(page.show(&request(4096)).unwrap_err(), Errno::EINVAL);
        page.begin();
        assert_eq!(page.show(&request(EVENT_PAGE_SIZE + 1)).unwrap_err(), Errno::EINVAL);
        let shown = page.show(&request(EVENT_PAGE_SIZE)).unwrap();
        let mut slots = vec![0; 32768];
        std::os::unix::fs::FileExt::read_exact_at(&File::from(shown.file), &mut slots, shown.offset).unwrap();
        assert!(slots.iter().all(|byte| *byte == 0xff));
    }
}
