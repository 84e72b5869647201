//! Unmodified programs under `libkfd_model_preload.so`.

#[cfg(test)]
mod files;
#[cfg(test)]
mod rocminfo;
#[cfg(test)]
mod share;
#[cfg(test)]
mod support;
