use std::sync::RwLock;
use std::sync::atomic::Ordering;

use super::*;
use crate::arena::PAGE;
use crate::engine::windows::WINDOW;
use crate::space::Mapping;

struct Table(RwLock<AddressSpace>);

impl PageTable for Table {
    fn space(&self) -> RwLockReadGuard<'_, AddressSpace> {
        self.0.read().unwrap()
    }

    fn generation(&self) -> u64 {
        0
    }
}

const BOTH: VmPageFlags = VmPageFlags::PAGE_READABLE.union(VmPageFlags::PAGE_WRITEABLE);
const ARENA: u64 = 0x10_0000;
const SECOND: u64 = ARENA + 4 * PAGE;
const READ_ONLY: u64 = 0x20_0000;
const NOWHERE: u64 = 0x30_0000;
const USER: u64 = 0x40_0000;
const GONE: u64 = 0x50_0000;

struct Fixture {
    view: View<Table>,
    arena: Arc<Arena>,
    offset: u64,
    _user: Vec<u8>,
    user: u64,
}

impl Fixture {
    fn new() -> Self {
        let arena = Arc::new(Arena::new("test", 1 << 24).unwrap());
        let mut space = AddressSpace::default();
        let mut map = |va, backing, pages: u64, flags| {
            space.map(va, Mapping { size: pages * PAGE, backing, object: 0, flags }).unwrap();
        };
        let from_arena = |pages: u64| {
            let offset = arena.allocate(pages * PAGE).unwrap();
            (Backing::Arena { arena: arena.clone(), offset }, offset)
        };
        let (first, offset) = from_arena(4);
        map(ARENA, first, 4, BOTH);
        // Not next to each other in the file.
        from_arena(1);
        map(SECOND, from_arena(4).0, 4, BOTH);
        map(READ_ONLY, from_arena(1).0, 1, VmPageFlags::PAGE_READABLE);
        map(NOWHERE, Backing::Nothing, 1, BOTH);
        let memory = vec![0u8; 5 * PAGE as usize];
        let user = (memory.as_ptr().expose_provenance() as u64).next_multiple_of(PAGE);
        map(USER, Backing::User(user), 4, BOTH);
        map(GONE, Backing::User(PAGE), 1, BOTH);
        let view = View::new(7, Table(RwLock::new(space)));
        Self { view, arena, offset, _user: memory, user }
    }

    fn memory(&self) -> &dyn Memory {
        &self.view
    }

    fn bytes(&self, va: u64, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        self.view.read(va, &mut bytes).unwrap();
        bytes
    }
}

fn pattern(length: usize) -> Vec<u8> {
    (0..length).map(|index| (index as u8).wrapping_mul(37).wrapping_add((index >> 8) as u8)).collect()
}

#[test]
fn what_is_written_is_in_the_file_and_in_the_process() {
    let fixture = Fixture::new();
    let text = pattern(3 * PAGE as usize);
    fixture.view.write(ARENA + 2 * PAGE, &text).unwrap();
    let mut bytes = vec![0; 2 * PAGE as usize];
    fixture.arena.read(fixture.offset + 2 * PAGE, &mut bytes).unwrap();
    assert_eq!(bytes, text[..bytes.len()]);
    assert_eq!(fixture.bytes(SECOND, PAGE as usize), text[bytes.len()..]);
    fixture.view.write(USER + 5, b"hello").unwrap();
    let mut bytes = [0; 5];
    UserMemory.read_bytes(UserPtr(fixture.user + 5), &mut bytes).unwrap();
    assert_eq!(&bytes, b"hello");
    assert_eq!(fixture.bytes(USER + 5, 5), b"hello");
    fixture.view.write(NOWHERE, b"lost").unwrap();
    assert_eq!(fixture.bytes(NOWHERE, 4), [0; 4]);
}

#[test]
fn atomics_are_on_the_page_itself() {
    let fixture = Fixture::new();
    for va in [ARENA + 16, USER + 16] {
        fixture.memory().store64(va, 10).unwrap();
        let old = fixture.memory().update64(va, &mut |word| word.fetch_sub(1, Ordering::AcqRel)).unwrap();
        assert_eq!((old, fixture.memory().load64(va).unwrap()), (10, 9));
        fixture.memory().store32(va + 4, 3).unwrap();
        assert_eq!(fixture.bytes(va, 8), [9, 0, 0, 0, 3, 0, 0, 0]);
    }
    let mut bytes = [0; 8];
    UserMemory.read_bytes(UserPtr(fixture.user + 16), &mut bytes).unwrap();
    assert_eq!(bytes, [9, 0, 0, 0, 3, 0, 0, 0]);
    fixture.memory().store64(NOWHERE, 5).unwrap();
    assert_eq!(fixture.memory().load64(NOWHERE).unwrap(), 0);
}

#[test]
fn counts_of_several_threads_are_exact() {
    let fixture = Fixture::new();
    for va in [ARENA, USER] {
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..1000 {
                        fixture
                            .memory()
                            .update32(va, &mut |word| word.fetch_add(1, Ordering::AcqRel))
                            .unwrap();
                    }
                });
            }
        });
        assert_eq!(fixture.memory().load32(va).unwrap(), 4000);
    }
}

#[test]
fn copies_between_all_kinds_of_memory() {
    let length = 4 * PAGE as usize - 20;
    for (from, to) in [(ARENA, SECOND), (ARENA, USER), (USER, ARENA), (USER, USER + 8), (ARENA, ARENA + 8)] {
        let fixture = Fixture::new();
        let text = pattern(length);
        fixture.view.write(from + 3, &text).unwrap();
        fixture.view.copy(to + 10, from + 3, length as u64).unwrap();
        assert!(fixture.bytes(to + 10, length) == text, "from {from:#x} to {to:#x}");
    }
    let fixture = Fixture::new();
    fixture.view.write(ARENA, &pattern(64)).unwrap();
    fixture.view.write(USER, &pattern(64)).unwrap();
    fixture.view.copy(ARENA, NOWHERE, 32).unwrap();
    fixture.view.copy(USER, NOWHERE, 32).unwrap();
    fixture.view.copy(NOWHERE, ARENA, 32).unwrap();
    for va in [ARENA, USER] {
        assert_eq!(fixture.bytes(va, 64), [&[0; 32], &pattern(64)[32..]].concat());
    }
}

#[test]
fn a_copy_crosses_mappings_and_the_ends_of_windows() {
    // Two buffers on both sides of a window's end; nothing between is ever touched.
    let arena = Arc::new(Arena::new("test", 3 * WINDOW).unwrap());
    let mut space = AddressSpace::default();
    let mut map = |va, offset| {
        let backing = Backing::Arena { arena: arena.clone(), offset };
        space.map(va, Mapping { size: 4 * PAGE, backing, object: 0, flags: BOTH }).unwrap();
    };
    map(ARENA, WINDOW - 2 * PAGE);
    map(SECOND, 2 * WINDOW - PAGE);
    let view = View::new(7, Table(RwLock::new(space)));
    let text = pattern(6 * PAGE as usize);
    view.write(ARENA + 100, &text).unwrap();
    let mut back = vec![0; text.len()];
    view.read(ARENA + 100, &mut back).unwrap();
    assert!(back == text);
    let mut bytes = [0; 8];
    arena.read(2 * WINDOW - PAGE, &mut bytes).unwrap();
    assert_eq!(bytes, text[4 * PAGE as usize - 100..][..8]);
    view.copy(ARENA + 4, ARENA + 100, text.len() as u64).unwrap();
    view.read(ARENA + 4, &mut back).unwrap();
    assert!(back == text);
}

#[test]
fn faults_say_where_and_why() {
    let fixture = Fixture::new();
    let fault = |va, access, reason| Err(Fault { gpu_id: 7, va, access, reason });
    let view = &fixture.view;
    let end = SECOND + 4 * PAGE;
    let mut buffer = [0u8; 16];
    assert_eq!(view.read(end - 8, &mut buffer), fault(end, "read", FaultReason::NotPresent));
    assert_eq!(view.write(end - 8, &buffer), fault(end, "write", FaultReason::NotPresent));
    assert_eq!(view.write(READ_ONLY, &buffer), fault(READ_ONLY, "write", FaultReason::ReadOnly));
    assert_eq!(view.read(READ_ONLY, &mut buffer), Ok(()));
    assert_eq!(view.read(GONE, &mut buffer), fault(GONE, "read", FaultReason::NoBacking));
    assert_eq!(view.read(u64::MAX, &mut buffer), fault(u64::MAX, "read", FaultReason::NotPresent));
    let word = |va, access| view.word(va, access, &mut |_| panic!("ran at {va:#x}"));
    assert_eq!(word(GONE, Access::Read), fault(GONE, "read", FaultReason::NoBacking));
    assert_eq!(word(READ_ONLY, Access::Write), fault(READ_ONLY, "write", FaultReason::ReadOnly));
    assert_eq!(word(end, Access::Write), fault(end, "write", FaultReason::NotPresent));
    assert_eq!(view.copy(end - 8, ARENA, 16), fault(end, "write", FaultReason::NotPresent));
    assert_eq!(view.copy(ARENA, end - 8, 16), fault(end, "read", FaultReason::NotPresent));
    assert_eq!(view.copy(READ_ONLY, ARENA, 16), fault(READ_ONLY, "write", FaultReason::ReadOnly));
    assert_eq!(view.copy(GONE, ARENA, 16), fault(GONE, "write", FaultReason::NoBacking));
    assert_eq!(view.copy(ARENA, GONE, 16), fault(GONE, "read", FaultReason::NoBacking));
}

#[test]
fn an_address_of_the_process_is_none_of_the_gpu() {
    let fixture = Fixture::new();
    let mut byte = [0];
    assert!(fixture.view.read(fixture.user, &mut byte).is_err());
}
