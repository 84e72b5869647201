//! The program that calls every function of the thunk (tests/c/every.c), in an unmodified guest, through `libhsakmt.so.1` and
//! `libhsakmt_virtio`. See `every_function.rs`.
#![allow(clippy::unwrap_used, clippy::panic, reason = "all of this is tests")]

#[path = "every/page.rs"]
mod page;

use std::time::Duration;

use virtio_kfd_images::image::THUNK;
use virtio_kfd_tests::parts::{OPEN_TO_USERS, kernel_complaints, package_path, user};
use virtio_kfd_tests::{Artifacts, CProgram, Command, Daemon, Vm, need};

const LIMIT: Duration = Duration::from_secs(240);
const PROGRAM: &str = "/opt/virtio-kfd/every";
const VIRTIO: &str = "/opt/virtio-kfd/libhsakmt_virtio.so.1";

#[test]
fn each_function_does_what_the_page_says() {
    let artifacts = need!(Artifacts::for_guest(&[], &["rocm-trixie"]));
    let mut builder = Vm::builder(&artifacts).unwrap();
    need!(artifacts.thunk());
    let virtio = need!(artifacts.virtio("376", "libhsakmt_virtio.so.1"));
    let root = artifacts.packages("rocm-trixie").unwrap();
    let program = CProgram::compile_alone(&root, &package_path("tests/c/every.c")).unwrap();
    builder.overlay().file(PROGRAM.trim_start_matches('/'), program.path()).unwrap();
    builder.overlay().file(VIRTIO.trim_start_matches('/'), &virtio).unwrap();
    let daemon = Daemon::start(&artifacts, "model:gfx906", &[]).unwrap();
    let guest = builder.memory_mib(1024).limit(3 * LIMIT).boot_on(&daemon).unwrap();
    guest.run(&Command::shell(OPEN_TO_USERS).limit(LIMIT)).unwrap().checked().unwrap();
    let thunk = format!("/{}", THUNK.trim_start_matches('/'));
    for arguments in [format!("{thunk} - 356 48 1056 68"), format!("{VIRTIO} v 376 52 1056 68")] {
        let output = guest.run(&user(&format!("{PROGRAM} {arguments}")).limit(LIMIT)).unwrap();
        assert!(output.success(), "{arguments}: {output}\n{}", daemon.report());
        page::check(&output.text(), false);
    }
    assert_eq!(kernel_complaints(&guest).unwrap(), "");
}
