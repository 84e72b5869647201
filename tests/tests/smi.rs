//! Streams of system management events: AMD's thunk natively on the model, our libhsakmt in loop-back, and AMD's thunk on
//! `libkfd_preload.so` in loop-back. In a guest: `qemu_waiting`.
//!
//! Expected: `kfd_smi_events.c` of Linux 6.12 (masks, `EAGAIN`, what a small buffer gets), `KFD_EVENT_FMT_VMFAULT` of
//! linux/kfd_ioctl.h, statuses of libhsakmt's events.c.
#![allow(clippy::unwrap_used, clippy::panic, reason = "all of this is tests")]

use std::time::Duration;

use virtio_kfd_tests::thunk_stack::SET;
use virtio_kfd_tests::{Artifacts, ThunkStack, Under, need};

const LIMIT: Duration = Duration::from_secs(120);

const BEGIN: &str = "before the open: KERNEL_IO_CHANNEL_NOT_OPENED
no such node: INVALID_NODE_UNIT
a CPU: ERROR
";

const FAULTS: &str = "300 of 300 were opened and closed
close on exec: 0, may be read and written: 1
nothing yet: EAGAIN
readable: 0
the memory event: SUCCESS
readable: 1
poll: the fault, by this process
epoll: 1, by the copy: 1
a copy: the fault, by this process
readable: 1 1 1
everything: the fault, by this process
once only: EAGAIN
a mask right before: the fault, by this process
no mask: EAGAIN
other events: EAGAIN
a mask that was taken back: EAGAIN
three bytes: 1
the rest: 1
then: EAGAIN
readable: 1
a child reads it: 1
the parent then: EAGAIN
close: SUCCESS
";

const DEVICE: &str = "a GPU: 0, a descriptor: 1
no such GPU: EINVAL, untouched: 1
null: EFAULT
close: SUCCESS
";

fn stack() -> anyhow::Result<ThunkStack> {
    Ok(ThunkStack::start(Artifacts::for_thunk(&["libkfd_preload.so"], &[SET])?, "smi").unwrap())
}

#[track_caller]
fn prints(stack: &ThunkStack, under: &Under<'_>, mode: &[&str], expected: &str) {
    let found = stack.text(under, mode, LIMIT).unwrap();
    assert_eq!(found, format!("{BEGIN}{expected}"), "{under:?}\n{}", stack.daemon().report());
}

#[test]
fn streams_have_the_faults_of_the_process_that_they_were_asked_for() {
    let stack = need!(stack());
    for under in [stack.native(), stack.ours(), stack.seam()].map(Result::unwrap) {
        prints(&stack, &under, &[], FAULTS);
    }
}

#[test]
fn the_device_refuses_what_the_kernel_does() {
    let stack = need!(stack());
    for under in [stack.native(), stack.seam()].map(Result::unwrap) {
        prints(&stack, &under, &["device"], DEVICE);
    }
}

/// A limit (docs/limits.md): natively the stream outlives the library's close, and has no more to say.
#[test]
fn a_stream_ends_with_the_connection() {
    let stack = need!(stack());
    prints(&stack, &stack.native().unwrap(), &["close"], "close: SUCCESS\nits stream: EAGAIN\n");
    prints(&stack, &stack.ours().unwrap(), &["close"], "close: SUCCESS\nits stream: the end\n");
}
