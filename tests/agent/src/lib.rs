//! The in-guest agent and the protocol that the test harness speaks with it.
//!
//! [`wire`] is shared by both sides; [`session`] serves one connection; [`init`] brings a guest up from process 1.

pub mod init;
pub mod port;
pub mod session;
pub mod wire;
