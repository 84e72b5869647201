//! The debug mailbox, from the side of a test.

use kfd_abi::drm::amdgpu::VmPageFlags;
use kfd_abi::memory::AllocFlags;
use kfd_model::debug::{Mailbox, MailboxError};
use kfd_model::space::{Fault, FaultReason};

use crate::caller::{Caller, PAGE, model, peek, poke};

const VA: u64 = 0x7000_0000_0000;

fn caller(directory: &tempfile::TempDir) -> (Caller, Mailbox) {
    let mut model = model("gfx906");
    model.open_mailbox(directory.path()).unwrap();
    let caller = Caller::on(model);
    caller.acquire(&caller.gpus[0], &caller.gpus[0].descriptor).unwrap();
    let mut found = Mailbox::find(directory.path()).unwrap();
    assert_eq!(found.len(), 1);
    (caller, found.pop().unwrap())
}

fn fault<T: std::fmt::Debug>(result: Result<T, MailboxError>) -> Fault {
    match result {
        Err(MailboxError::Fault(fault)) => fault,
        other => panic!("{other:?}"),
    }
}

#[test]
fn memory_is_read_and_written_through_the_gpus_page_table() {
    let directory = tempfile::tempdir().unwrap();
    let (caller, mailbox) = caller(&directory);
    let gpu = caller.gpu();
    assert_eq!(mailbox.pid(), Some(std::process::id()));
    let mut bytes = [0u8; 3];
    assert_eq!(fault(mailbox.read(gpu, VA, &mut bytes)).reason, FaultReason::NotPresent, "before any memory");

    // Longer than one exchange carries.
    let size = 64 * PAGE;
    let buffer = caller.allocate(gpu, VA, size, AllocFlags::VRAM | AllocFlags::WRITABLE).unwrap();
    assert_eq!(fault(mailbox.read(gpu, VA, &mut bytes)).reason, FaultReason::NotPresent, "not mapped");
    caller.map(buffer.handle, &[gpu]).0.unwrap();
    let pattern: Vec<u8> = (0..size).map(|at| (at % 251) as u8).collect();
    mailbox.write(gpu, VA, &pattern).unwrap();
    let map = caller.mmap_render(&caller.gpus[0], buffer.mmap_offset, size).unwrap();
    let mut seen = vec![0; pattern.len()];
    peek(&map, 0, &mut seen);
    assert!(seen == pattern, "the CPU sees what the GPU wrote");
    poke(&map, size - 3, b"end");
    let mut back = vec![0; pattern.len()];
    mailbox.read(gpu, VA, &mut back).unwrap();
    assert_eq!(&back[back.len() - 3..], b"end");
    assert!(back[..back.len() - 3] == pattern[..pattern.len() - 3]);

    let beyond = fault(mailbox.read(gpu, VA + size - 1, &mut bytes));
    assert_eq!((beyond.va, beyond.reason), (VA + size, FaultReason::NotPresent));
    let entry = mailbox.entry(gpu, VA + PAGE).unwrap();
    let flags = VmPageFlags::PAGE_READABLE | VmPageFlags::PAGE_WRITEABLE;
    assert_eq!((entry.start, entry.size), (VA, size));
    assert!(entry.flags.contains(flags) && !entry.flags.contains(VmPageFlags::PAGE_EXECUTABLE));
    assert_eq!(fault(mailbox.read(gpu + 1, VA, &mut bytes)).reason, FaultReason::NotPresent, "no such GPU");
}

#[test]
fn permissions_are_told_apart() {
    let directory = tempfile::tempdir().unwrap();
    let (caller, mailbox) = caller(&directory);
    let gpu = caller.gpu();
    for (va, flags) in [(VA, AllocFlags::empty()), (VA + (1 << 30), AllocFlags::EXECUTABLE)] {
        let buffer = caller.allocate(gpu, va, PAGE, AllocFlags::GTT | flags).unwrap();
        caller.map(buffer.handle, &[gpu]).0.unwrap();
    }
    let mut bytes = [0u8; 4];
    mailbox.read(gpu, VA, &mut bytes).unwrap();
    assert_eq!(fault(mailbox.write(gpu, VA, &bytes)).reason, FaultReason::ReadOnly);
    assert_eq!(fault(mailbox.fetch(gpu, VA, &mut bytes)).reason, FaultReason::NoExecute);
    mailbox.fetch(gpu, VA + (1 << 30), &mut bytes).unwrap();
}

#[test]
fn threads_ask_at_once() {
    let directory = tempfile::tempdir().unwrap();
    let (caller, mailbox) = caller(&directory);
    let gpu = caller.gpu();
    let flags = AllocFlags::VRAM | AllocFlags::WRITABLE;
    let buffer = caller.allocate(gpu, VA, 4 * PAGE, flags).unwrap();
    caller.map(buffer.handle, &[gpu]).0.unwrap();
    std::thread::scope(|scope| {
        for thread in 0..4u8 {
            let mailbox = &mailbox;
            scope.spawn(move || {
                let va = VA + u64::from(thread) * PAGE;
                for round in 0..50u8 {
                    let wrote = [thread ^ round; PAGE as usize];
                    mailbox.write(gpu, va, &wrote).unwrap();
                    let mut read = [0; PAGE as usize];
                    mailbox.read(gpu, va, &mut read).unwrap();
                    assert!(read == wrote);
                }
            });
        }
    });
}

#[test]
fn a_mailbox_goes_with_its_process() {
    let directory = tempfile::tempdir().unwrap();
    let (caller, mailbox) = caller(&directory);
    assert!(mailbox.is_alive());
    drop(caller);
    assert!(!mailbox.path().exists());
    let gone = mailbox.read(1, VA, &mut [0]);
    assert!(matches!(gone, Err(MailboxError::Gone { .. })), "{gone:?}");

    // One that was left behind is not found, and removed; other files stay.
    let left = directory.path().join("1-0.mailbox");
    let other = directory.path().join("notes.txt");
    let mut model = model("gfx906");
    model.open_mailbox(directory.path()).unwrap();
    let whole = Mailbox::find(directory.path()).unwrap();
    std::fs::copy(whole[0].path(), &left).unwrap();
    std::fs::write(&other, "text").unwrap();
    assert_eq!(Mailbox::find(directory.path()).unwrap().len(), 1);
    assert!(!left.exists() && other.exists());
    std::fs::write(&left, "short").unwrap();
    assert!(matches!(Mailbox::open(&left), Err(MailboxError::Foreign { .. })));
}
