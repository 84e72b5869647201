//! The harness of the behaviour tests: QEMU guests with an agent inside, and the artifacts that go into them.
//!
//! A test that cannot run where it is prints why and returns; [`skip!`](crate::skip) does both, and the line that it
//! prints is what `cargo xtask test` counts.

pub mod accel;
pub mod artifacts;
pub mod c_program;
pub mod conformance;
pub mod cpu_time;
pub mod gpu_guest;
pub mod gpu_program;
pub mod gpu_view;
pub mod guest;
pub mod hang;
pub mod host;
pub mod installed;
pub mod moments;
pub mod native;
pub mod parts;
pub mod process;
pub mod qemu;
pub mod qmp;
pub mod rocminfo;
pub mod rocrtst;
pub mod runtime;
pub mod seam_guest;
pub mod shared_vm;
pub mod talk;
pub mod thunk_stack;
pub mod transcript;
pub mod vm;

pub use artifacts::Artifacts;
pub use c_program::CProgram;
pub use gpu_program::GpuPrograms;
pub use guest::{Command, Guest, Output};
pub use host::Daemon;
pub use native::Under;
pub use process::Keeper;
pub use rocrtst::Rocrtst;
pub use runtime::Runtime;
pub use shared_vm::SharedVm;
pub use thunk_stack::ThunkStack;
pub use vm::{Vm, VmBuilder};

/// Prints `SKIP: ` and the reason, and returns from the test.
#[macro_export]
macro_rules! skip {
    ($($reason:tt)*) => {{
        println!("SKIP: {}", format_args!($($reason)*));
        return;
    }};
}

/// The value of a `Result`, or a return from the test with a skip line that says why there is none.
#[macro_export]
macro_rules! need {
    ($value:expr) => {
        match $value {
            Ok(value) => value,
            Err(reason) => $crate::skip!("{reason:#}"),
        }
    };
}
