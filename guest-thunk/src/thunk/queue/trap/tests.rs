//! Programs that move doorbells which trap.
#![allow(unsafe_code, reason = "a program that moves memory")]

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

use nix::sys::memfd::{MFdFlags, memfd_create};

use super::*;

/// Doorbells in a file.
struct Doorbells {
    file: File,
    home: Reservation,
}

impl Doorbells {
    fn new() -> Arc<Doorbells> {
        let file = File::from(memfd_create(c"doorbells", MFdFlags::MFD_CLOEXEC).unwrap());
        file.set_len(2 * page_size()).unwrap();
        let home = Reservation::new(2 * page_size(), page_size(), 0, ANYWHERE).unwrap();
        let made = Doorbells { file, home };
        made.map_again(made.start()).unwrap();
        Arc::new(made)
    }
}

impl Slice for Doorbells {
    fn start(&self) -> u64 {
        self.home.start()
    }

    fn size(&self) -> u64 {
        self.home.size()
    }

    fn map_again(&self, address: u64) -> io::Result<()> {
        let (place, length) = (address as usize, self.size() as usize);
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_SHARED | libc::MAP_FIXED;
        let place = std::ptr::with_exposed_provenance_mut(place);
        // SAFETY: the addresses are this test's own.
        let mapped = unsafe { libc::mmap(place, length, protection, flags, self.file.as_raw_fd(), 0) };
        assert_eq!(mapped, place);
        Ok(())
    }

    fn may_go(&self) -> bool {
        true
    }
}

/// Moves what is mapped at two pages elsewhere. It can be called from any thread, and waits until the move was heard of.
fn move_away(from: u64, to: Reservation) {
    let place = |address: u64| std::ptr::with_exposed_provenance_mut::<libc::c_void>(address as usize);
    let size = to.size() as usize;
    let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
    // SAFETY: both are this test's own.
    let moved = unsafe { libc::mremap(place(from), size, size, flags, place(to.start())) };
    assert_eq!(moved, place(to.start()), "{}", io::Error::last_os_error());
    // For the rest of the test.
    std::mem::forget(to);
}

fn store(address: u64, value: u64) {
    let pointer = std::ptr::with_exposed_provenance::<std::sync::atomic::AtomicU64>(address as usize);
    // SAFETY: the address is a doorbell's.
    unsafe { &*pointer }.store(value, Ordering::Release);
}

/// Fails if the body takes a minute: what is tested are waits for one another.
fn in_a_minute(body: impl FnOnce() + Send + 'static) {
    let (ended, ends) = channel();
    let thread = thread::spawn(move || {
        body();
        let _ = ended.send(());
    });
    match ends.recv_timeout(Duration::from_secs(60)) {
        Err(std::sync::mpsc::RecvTimeoutError::Timeout) => panic!("it still waits"),
        _ => thread.join().unwrap(),
    }
}

fn armed(doorbells: &Arc<Doorbells>) -> Option<(Rc<Traps>, Armed)> {
    let traps = match faults() {
        Ok(faults) => Traps::new(faults),
        Err(error) => {
            println!("SKIP: userfaultfd for user mode: {error}");
            return None;
        }
    };
    let mover = Mover::start().unwrap();
    let slice = Arc::clone(doorbells) as Arc<dyn Slice>;
    let (armed, rung) = Armed::new(&traps, &mover, &slice).unwrap().unwrap();
    assert!(!rung);
    Some((traps, armed))
}

/// One thread rings, and another one moves the doorbells before they are given back: what it does has not been heard of then.
#[test]
fn doorbells_that_are_being_moved_are_given_back_where_they_come_to() {
    in_a_minute(|| {
        let doorbells = Doorbells::new();
        let Some((traps, mut armed)) = armed(&doorbells) else { return };
        let to = Reservation::new(doorbells.size(), page_size(), 0, ANYWHERE).unwrap();
        let (from, at) = (doorbells.start(), to.start());
        let mover = thread::spawn(move || move_away(from, to));
        // The move is done, and its thread waits.
        while readable([traps.faults.as_fd()], None).unwrap() != [true] {}
        assert!((0..100).all(|_| armed.waits(from).is_none()), "until it is heard of");
        assert!(armed.give_back());
        mover.join().unwrap();
        store(at + 8, 7);
        let mut word = [0; 8];
        doorbells.file.read_exact_at(&mut word, 8).unwrap();
        assert_eq!(u64::from_ne_bytes(word), 7, "in the memory that the host sees");
        drop(armed);
        assert!(traps.places.borrow().is_empty());
    });
}
