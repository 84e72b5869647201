//! Arithmetic in rounding modes other than nearest-even (MODE.ROUND), which compilers choose for single operations. The
//! host's floats only round to nearest, so this goes through LLVM's APFloat (crate `rustc_apfloat`), at a thousandth of
//! the speed.
//!
//! The approximated functions, the steps of a division (`v_div_scale`, `v_div_fmas`, `v_div_fixup`), dot products and
//! `v_cvt_pk_u8_f32` round to nearest in all modes.

use rustc_apfloat::ieee::{self, Double, Single};
use rustc_apfloat::{Float, FloatConvert};

use super::lanes::{HalfBits, Short, op1, op2, op3};
use super::transcendental::flush32;
use super::{Handler, half, packed};
use crate::op::{Kind, Op};
use crate::wave::{Round, Wave};

/// The handler of an opcode whose result MODE.ROUND decides, for modes other than nearest-even.
pub(super) fn handler(op: Op) -> Option<Handler> {
    Some(match op {
        Op::VAddF32 => |w, i| {
            let round = round32(w);
            op2(w, i, move |a: f32, b: f32| f32s(single(a).add_r(single(b), round).value));
        },
        Op::VSubF32 => |w, i| {
            let round = round32(w);
            op2(w, i, move |a: f32, b: f32| f32s(single(a).sub_r(single(b), round).value));
        },
        Op::VSubrevF32 => |w, i| {
            let round = round32(w);
            op2(w, i, move |a: f32, b: f32| f32s(single(b).sub_r(single(a), round).value));
        },
        Op::VMulF32 => |w, i| {
            let round = round32(w);
            op2(w, i, move |a: f32, b: f32| multiply(a, b, round));
        },
        Op::VMulLegacyF32 => |w, i| {
            let round = round32(w);
            op2(w, i, move |a: f32, b: f32| if a == 0.0 || b == 0.0 { 0.0 } else { multiply(a, b, round) });
        },
        Op::VFmaF32 | Op::VFmacF32 => |w, i| {
            let round = round32(w);
            op3(w, i, move |a: f32, b: f32, c: f32| fused(a, b, c, round));
        },
        Op::VMadF32 | Op::VMacF32 | Op::VMadmkF32 | Op::VMadakF32 => |w, i| {
            let round = round32(w);
            op3(w, i, move |a: f32, b: f32, c: f32| mad(a, b, c, round));
        },
        Op::VMadLegacyF32 => |w, i| {
            let round = round32(w);
            op3(
                w,
                i,
                move |a: f32, b: f32, c: f32| {
                    if a == 0.0 || b == 0.0 { mad(0.0, 0.0, c, round) } else { mad(a, b, c, round) }
                },
            );
        },
        Op::VLdexpF32 => |w, i| {
            let round = round32(w);
            op2(w, i, move |a: f32, b: u32| f32s(single(a).scalbn_r(power(b as i32), round)));
        },
        Op::VCvtF32I32 => |w, i| {
            let round = round32(w);
            op1(w, i, move |a: u32| f32s(Single::from_i128_r(i128::from(a as i32), round).value));
        },
        Op::VCvtF32U32 => |w, i| {
            let round = round32(w);
            op1(w, i, move |a: u32| f32s(Single::from_i128_r(i128::from(a), round).value));
        },
        Op::VCvtF32F64 => |w, i| {
            let round = round32(w);
            op1(w, i, move |a: f64| f32s(double(a).convert_r(round, &mut false).value));
        },

        Op::VAddF64 => |w, i| {
            let round = round64(w);
            op2(w, i, move |a: f64, b: f64| f64s(double(a).add_r(double(b), round).value));
        },
        Op::VMulF64 => |w, i| {
            let round = round64(w);
            op2(w, i, move |a: f64, b: f64| f64s(double(a).mul_r(double(b), round).value));
        },
        Op::VFmaF64 => |w, i| {
            let round = round64(w);
            op3(w, i, move |a: f64, b: f64, c: f64| {
                f64s(double(a).mul_add_r(double(b), double(c), round).value)
            });
        },
        Op::VLdexpF64 => |w, i| {
            let round = round64(w);
            op2(w, i, move |a: f64, b: u32| f64s(double(a).scalbn_r(power(b as i32), round)));
        },

        Op::VAddF16 => |w, i| {
            let round = round64(w);
            op2(w, i, move |a: HalfBits, b: HalfBits| HalfBits(add16(a.0, b.0, round)));
        },
        Op::VSubF16 => |w, i| {
            let round = round64(w);
            op2(w, i, move |a: HalfBits, b: HalfBits| HalfBits(add16(a.0, b.0 ^ 0x8000, round)));
        },
        Op::VSubrevF16 => |w, i| {
            let round = round64(w);
            op2(w, i, move |a: HalfBits, b: HalfBits| HalfBits(add16(b.0, a.0 ^ 0x8000, round)));
        },
        Op::VMulF16 => |w, i| {
            let round = round64(w);
            op2(w, i, move |a: HalfBits, b: HalfBits| HalfBits(mul16(a.0, b.0, round)));
        },
        Op::VFmaF16 | Op::VFmaLegacyF16 => |w, i| {
            let round = round64(w);
            op3(w, i, move |a: HalfBits, b: HalfBits, c: HalfBits| HalfBits(fma16(a.0, b.0, c.0, round)));
        },
        Op::VMadF16 | Op::VMadLegacyF16 | Op::VMacF16 | Op::VMadmkF16 | Op::VMadakF16 => |w, i| {
            let round = round64(w);
            op3(w, i, move |a: HalfBits, b: HalfBits, c: HalfBits| {
                let [a, b, c] = [a, b, c].map(|bits| half::flush(bits.0));
                HalfBits(half::flush(add16(half::flush(mul16(a, b, round)), c, round)))
            });
        },
        Op::VLdexpF16 => |w, i| {
            let round = round64(w);
            op2(w, i, move |a: HalfBits, b: Short| {
                HalfBits(bits16(half16(a.0).scalbn_r(power(i32::from(b.0 as i16)), round)))
            });
        },
        Op::VCvtF16F32 => |w, i| {
            let round = round64(w);
            op1(w, i, move |a: f32| HalfBits(bits16(single(a).convert_r(round, &mut false).value)));
        },
        Op::VCvtF16U16 => |w, i| {
            let round = round64(w);
            op1(w, i, move |a: Short| HalfBits(integer16(i128::from(a.0 & 0xffff), round)));
        },
        Op::VCvtF16I16 => |w, i| {
            let round = round64(w);
            op1(w, i, move |a: Short| HalfBits(integer16(i128::from(a.0 as i16), round)));
        },

        Op::VPkAddF16 => |w, i| {
            let round = round64(w);
            packed::float(w, i, move |a, b, _| add16(a, b, round));
        },
        Op::VPkMulF16 => |w, i| {
            let round = round64(w);
            packed::float(w, i, move |a, b, _| mul16(a, b, round));
        },
        Op::VPkFmaF16 => |w, i| {
            let round = round64(w);
            packed::float(w, i, move |a, b, c| fma16(a, b, c, round));
        },
        Op::VFmaMixF32 => |w, i| {
            let round = round32(w);
            packed::mix(w, i, Kind::F32, false, move |a, b, c| fused(a, b, c, round).to_bits());
        },
        Op::VMadMixF32 => |w, i| {
            let round = round32(w);
            packed::mix(w, i, Kind::F32, true, move |a, b, c| mad(a, b, c, round).to_bits());
        },
        Op::VFmaMixloF16 => |w, i| {
            let round = round64(w);
            packed::mix(w, i, Kind::F16, false, move |a, b, c| fused_to_half(a, b, c, round));
        },
        Op::VFmaMixhiF16 => |w, i| {
            let round = round64(w);
            packed::mix_high(w, i, false, move |a, b, c| fused_to_half(a, b, c, round));
        },
        Op::VMadMixloF16 => |w, i| {
            let (round, last) = (round32(w), round64(w));
            packed::mix(w, i, Kind::F16, true, move |a, b, c| {
                bits16(single(mad(a, b, c, round)).convert_r(last, &mut false).value)
            });
        },
        Op::VMadMixhiF16 => |w, i| {
            let (round, last) = (round32(w), round64(w));
            packed::mix_high(w, i, true, move |a, b, c| {
                bits16(single(mad(a, b, c, round)).convert_r(last, &mut false).value)
            });
        },
        _ => return None,
    })
}

fn direction(round: Round) -> rustc_apfloat::Round {
    match round {
        Round::NearestEven => rustc_apfloat::Round::NearestTiesToEven,
        Round::Up => rustc_apfloat::Round::TowardPositive,
        Round::Down => rustc_apfloat::Round::TowardNegative,
        Round::Zero => rustc_apfloat::Round::TowardZero,
    }
}

fn round32(wave: &Wave) -> rustc_apfloat::Round {
    direction(wave.mode.round32())
}

fn round64(wave: &Wave) -> rustc_apfloat::Round {
    direction(wave.mode.round64())
}

fn single(value: f32) -> Single {
    Single::from_bits(u128::from(value.to_bits()))
}

fn f32s(value: Single) -> f32 {
    f32::from_bits(value.to_bits() as u32)
}

fn double(value: f64) -> Double {
    Double::from_bits(u128::from(value.to_bits()))
}

fn f64s(value: Double) -> f64 {
    f64::from_bits(value.to_bits() as u64)
}

fn half16(bits: u32) -> ieee::Half {
    ieee::Half::from_bits(u128::from(bits & 0xffff))
}

fn bits16(value: ieee::Half) -> u32 {
    value.to_bits() as u32
}

/// A power of two beyond which nothing changes.
fn power(power: i32) -> i32 {
    power.clamp(-10_000, 10_000)
}

fn multiply(a: f32, b: f32, round: rustc_apfloat::Round) -> f32 {
    f32s(single(a).mul_r(single(b), round).value)
}

fn fused(a: f32, b: f32, c: f32, round: rustc_apfloat::Round) -> f32 {
    f32s(single(a).mul_add_r(single(b), single(c), round).value)
}

fn mad(a: f32, b: f32, c: f32, round: rustc_apfloat::Round) -> f32 {
    let product = flush32(multiply(flush32(a), flush32(b), round));
    flush32(f32s(single(product).add_r(single(flush32(c)), round).value))
}

/// Rounded once: the product and the sum are exact in 113 bits wherever it matters to an f16.
fn fused_to_half(a: f32, b: f32, c: f32, round: rustc_apfloat::Round) -> u32 {
    let [a, b, c] = [a, b, c].map(|value| -> ieee::Quad { single(value).convert(&mut false).value });
    bits16(a.mul_add_r(b, c, round).value.convert_r(round, &mut false).value)
}

fn add16(a: u32, b: u32, round: rustc_apfloat::Round) -> u32 {
    bits16(half16(a).add_r(half16(b), round).value)
}

fn mul16(a: u32, b: u32, round: rustc_apfloat::Round) -> u32 {
    bits16(half16(a).mul_r(half16(b), round).value)
}

fn fma16(a: u32, b: u32, c: u32, round: rustc_apfloat::Round) -> u32 {
    bits16(half16(a).mul_add_r(half16(b), half16(c), round).value)
}

fn integer16(value: i128, round: rustc_apfloat::Round) -> u32 {
    bits16(ieee::Half::from_i128_r(value, round).value)
}
