//! The C API: the only `extern "C"` functions. Each checks its pointers, calls the logic, and turns every outcome, a panic
//! included, into a status. What the functions can do stands in one table, of which docs/coverage.md is made.

pub mod caller;
mod cancellation;
pub mod debug;
pub mod dtif;
pub mod event;
pub mod graphics;
pub mod libdrm;
pub mod memory;
pub mod open;
pub mod pointer;
pub mod process;
pub mod profile;
pub mod queue;
pub mod render;
pub mod topology;

mod coverage;

use std::panic::{AssertUnwindSafe, catch_unwind};

use hsakmt_abi::status::HsakmtStatus;

use self::cancellation::Uncancelled;
pub use self::coverage::coverage_page;
use crate::thunk::refusal::{Level, Outcome, say};

/// How far a function is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// It does what AMD's library does, but for what the note says.
    Done,
    /// It answers `HSAKMT_STATUS_NOT_IMPLEMENTED`.
    NotImplemented,
    /// It answers `HSAKMT_STATUS_NOT_SUPPORTED`: a host with an unmodified kernel cannot do it for a guest.
    NotSupported,
}

/// An exported function.
#[derive(Clone, Copy, Debug)]
pub struct Export {
    /// Its name.
    pub name: &'static str,
    /// The noun that its file is named after.
    pub noun: &'static str,
    /// How far it is.
    pub state: State,
    /// What differs from AMD's library, or why it does not do it.
    pub note: &'static str,
}

/// All functions of the `hsaKmt` API, by noun.
pub const EXPORTS: &[&[Export]] = &[
    open::EXPORTS,
    topology::EXPORTS,
    event::EXPORTS,
    memory::EXPORTS,
    process::EXPORTS,
    queue::EXPORTS,
    graphics::EXPORTS,
    render::EXPORTS,
    debug::EXPORTS,
    profile::EXPORTS,
];

/// The functions of libdrm and libdrm_amdgpu that work with our handles.
pub const LIBDRM: &[&[&str]] = &[render::LIBDRM, libdrm::DONE];

/// Those that answer `-EOPNOTSUPP` for our handles.
pub const LIBDRM_REFUSED: &[&str] = libdrm::REFUSED;

/// Runs a call's logic. Nothing unwinds into C, and no cancellation of the thread out of it.
fn boundary(name: &'static str, logic: impl FnOnce() -> Outcome<()>) -> HsakmtStatus {
    let _uncancelled = Uncancelled::enter();
    match catch_unwind(AssertUnwindSafe(logic)) {
        Ok(Ok(())) => HsakmtStatus::SUCCESS,
        Ok(Err(refusal)) => {
            let level = match refusal.status {
                HsakmtStatus::WAIT_TIMEOUT | HsakmtStatus::KERNEL_ALREADY_OPENED => Level::Debug,
                _ => Level::Error,
            };
            say(level, || format!("{name}: {refusal}"));
            refusal.status
        }
        Err(_) => {
            say(Level::Error, || format!("{name}: a defect of this library ended the call"));
            HsakmtStatus::ERROR
        }
    }
}

/// A function that is not done says so.
fn refuse(name: &'static str, status: HsakmtStatus) -> HsakmtStatus {
    say(Level::Warning, || format!("{name}: {status}"));
    status
}

/// Defines exported functions and their rows of the table. A function that is not done answers its state; with a body,
/// once that has found nothing wrong.
macro_rules! exports {
    (
        $noun:literal;
        $(
            $(#[doc = $doc:literal])*
            $state:ident $(($note:literal))?
            fn $name:ident($($argument:ident: $type:ty),* $(,)?) $($body:block)? $(;)?
        )*
    ) => {
        /// The functions of this noun.
        pub const EXPORTS: &[$crate::export::Export] = &[$(
            $crate::export::Export {
                name: stringify!($name),
                noun: $noun,
                state: $crate::export::exports!(@state $state),
                note: concat!("" $(, $note)?),
            },
        )*];

        $(
            $(#[doc = $doc])*
            ///
            /// # Safety
            /// As hsakmt.h says: pointers are null or valid for the time of the call.
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $name($($argument: $type),*) -> hsakmt_abi::status::HsakmtStatus {
                $crate::export::exports!(@run $state $name ($($argument)*) $($body)?)
            }
        )*
    };
    (@state done) => { $crate::export::State::Done };
    (@state not_implemented) => { $crate::export::State::NotImplemented };
    (@state not_supported) => { $crate::export::State::NotSupported };
    (@run done $name:ident ($($argument:ident)*) $body:block) => {
        $crate::export::boundary(stringify!($name), || $body)
    };
    // A function that is not done but checks its arguments first.
    (@run not_implemented $name:ident ($($argument:ident)*) $body:block) => {
        $crate::export::boundary(stringify!($name), || {
            let checked: $crate::thunk::refusal::Outcome<()> = $body;
            checked?;
            let status = hsakmt_abi::status::HsakmtStatus::NOT_IMPLEMENTED;
            Err($crate::thunk::refusal::Refusal::new(status, "this function is not implemented"))
        })
    };
    (@run not_supported $name:ident ($($argument:ident)*) $body:block) => {
        $crate::export::boundary(stringify!($name), || {
            let checked: $crate::thunk::refusal::Outcome<()> = $body;
            checked?;
            let status = hsakmt_abi::status::HsakmtStatus::NOT_SUPPORTED;
            Err($crate::thunk::refusal::Refusal::new(status, "a guest cannot have this"))
        })
    };
    (@run not_implemented $name:ident ($($argument:ident)*)) => {{
        $(let _ = $argument;)*
        $crate::export::refuse(stringify!($name), hsakmt_abi::status::HsakmtStatus::NOT_IMPLEMENTED)
    }};
    (@run not_supported $name:ident ($($argument:ident)*)) => {{
        $(let _ = $argument;)*
        $crate::export::refuse(stringify!($name), hsakmt_abi::status::HsakmtStatus::NOT_SUPPORTED)
    }};
}
use exports;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::thunk::refusal::Refusal;

    #[test]
    fn a_panic_is_an_error() {
        assert_eq!(boundary("test", || panic!("a defect")), HsakmtStatus::ERROR);
        assert_eq!(boundary("test", || Ok(())), HsakmtStatus::SUCCESS);
        let refused = boundary("test", || Err(Refusal::parameter("no")));
        assert_eq!(refused, HsakmtStatus::INVALID_PARAMETER);
    }
}
