//! Programs under a preload library that is made with this crate.

#[cfg(test)]
mod c_programs;
#[cfg(test)]
mod exports;
#[cfg(test)]
mod support;
#[cfg(test)]
mod tools;
