//! The programs of the suite, and how a run on our stack is compared with a native one.

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use virtio_kfd_tests::Daemon;
use virtio_kfd_tests::native::text;
use virtio_kfd_tests::parts::package_path;
use virtio_kfd_tests::transcript::assert_same_lines;

pub const GPU: &str = "gfx906";
pub const LIMIT: Duration = Duration::from_secs(240);

pub fn source(name: &str) -> PathBuf {
    package_path(&format!("tests/hip/{name}.hip"))
}

/// Runs a program natively and in loop-back, where `daemon` serves it. It says itself whether it is right, and prints the
/// same in both places.
pub fn compare(name: &str, what: &str, native: Command, ours: Command, daemon: &Daemon) {
    let native = text(native, LIMIT).unwrap_or_else(|error| panic!("{name} {what} on the model: {error:#}"));
    let ours = text(ours, LIMIT)
        .unwrap_or_else(|error| panic!("{name} {what} in loop-back: {error:#}\n{}", daemon.report()));
    for (place, text) in [("on the model", &native), ("in loop-back", &ours)] {
        assert_eq!(text.lines().last(), Some(&*format!("{name}: all right")), "{what} {place}:\n{text}");
    }
    assert_same_lines(what, ("native", "loop-back"), &native, &ours);
    println!("{name} {what}\n{ours}");
}

macro_rules! programs {
    ($($name:ident)*) => {
        /// Their names.
        pub const NAMES: &[&str] = &[$(stringify!($name)),*];

        /// A test for each program, which calls `all`.
        macro_rules! tests {
            () => {$(
                #[test]
                fn $name() {
                    all(stringify!($name));
                }
            )*};
        }
    };
}

programs! { vectors matrix reduce sort lanes integers floats doubles halves scratch atomics printf buffers memory streams }
