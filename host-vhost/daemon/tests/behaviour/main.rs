//! The daemon as its users see it: started as a program, driven by a small VMM with real virtqueues.
//!
//! The worker is a stub that speaks kfd-ipc, so that these tests need neither KFD nor the model: this program
//! itself, started by the supervisor under the worker's name.

// A test with a main function of its own is not cfg(test), which the lints would let pass.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, clippy::panic)]
#![allow(missing_docs)]

mod blobs;
mod cli;
mod contexts;
mod daemon;
mod gpu;
mod ownership;
mod queues;
mod real;
mod room;
mod sharing;
mod stub;
mod vhost;
mod vmm;

use libtest_mimic::{Arguments, Trial};

fn main() {
    if std::env::args().next().as_deref() == Some("kfd-worker") {
        stub::run();
        return;
    }
    let tests: Vec<(&'static str, fn())> = [
        contexts::TESTS,
        blobs::TESTS,
        ownership::TESTS,
        queues::TESTS,
        room::TESTS,
        sharing::TESTS,
        real::TESTS,
        vhost::TESTS,
        cli::TESTS,
    ]
    .concat();
    let trials = tests.into_iter().map(|(name, test)| {
        Trial::test(name, move || {
            test();
            Ok(())
        })
    });
    libtest_mimic::run(&Arguments::from_args(), trials.collect()).exit();
}

/// A list of tests of a file: their functions under their names.
macro_rules! tests {
    ($($name:ident),* $(,)?) => {
        /// The tests of this file.
        pub const TESTS: &[(&str, fn())] =
            &[$((concat!(module_path!(), "::", stringify!($name)), $name as fn())),*];
    };
}
use tests;
