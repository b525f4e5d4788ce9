package fragmentation

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"slices"

	"gonum.org/v1/gonum/mat"
	"gonum.org/v1/gonum/optimize/convex/lp"

	"github.com/divvy-gpu/divvy/internal/core/accel"
)

// lot is so many devices of one size, or so many pieces that pods ask for.
type lot struct {
	units accel.Units
	count float64
}

const (
	// maxSizes bounds the sizes of pieces that the linear program tells apart.
	// A trace of a large company has 24.
	maxSizes = 40
	// maxSteps bounds the steps into which the largest device is cut.
	maxSteps = 1 << 12
	// maxRounds bounds the rounds of column generation; 24 sizes take about 30.
	maxRounds = 300
	// perturbation, of the right-hand sides, keeps each basic variable above zero,
	// so that the basis can be read from the solution.
	perturbation = 1e-7
)

// worth is what pieces of each size add to what a device is used for: the size
// less the price of a piece of it, where pieces are few. It is the solution of a
// linear program, the cutting-stock problem in which the devices are given and as
// much as possible of them is to be used:
//
//	maximize   sum over ways p to cut a device of  used(p) * x(p)
//	subject to sum over ways to cut devices of size D of  x(p)  <=  devices of size D
//	           sum over ways of  pieces of size s in p * x(p)   <=  pieces of size s
//
// A piece of a size of which there are few has a price, as there will not be
// one to fill each hole; its worth is lower by that. Ways to cut are generated
// as the program finds them worth their while (Gilmore and Gomory, "A Linear
// Programming Approach to the Cutting-Stock Problem", Operations Research 1961).
//
// devices and pieces have ascending sizes, above zero. The result has an entry
// for each of pieces.
func worth(devices, pieces []lot) ([]float64, error) {
	if len(devices) == 0 || len(pieces) == 0 {
		return make([]float64, len(pieces)), nil
	}
	p := newProgram(devices, pieces)
	for range maxRounds {
		if err := p.solve(); err != nil {
			return nil, fmt.Errorf("cutting stock with %d sizes of devices and %d of pieces: %w", len(devices), len(pieces), err)
		}
		if !p.improve() {
			break
		}
	}
	out := make([]float64, len(pieces))
	for i := range pieces {
		out[i] = max(0, p.gain(i)) * float64(p.largest)
	}
	return out, nil
}

// program is the linear program, scaled: sizes are parts of the largest device,
// counts are parts of the number of devices.
type program struct {
	devices, pieces []lot
	largest         accel.Units
	step            accel.Units
	// Columns are first the slacks of the constraints, then ways to cut.
	columns [][]float64
	cost    []float64
	right   []float64
	basis   []int
	// prices are of the constraints: those of devices, then those of pieces.
	prices []float64
}

func newProgram(devices, pieces []lot) *program {
	rows := len(devices) + len(pieces)
	p := &program{
		devices: devices, pieces: pieces, largest: devices[len(devices)-1].units,
		right: make([]float64, rows), prices: make([]float64, rows),
	}
	p.step = stepOf(p.largest, devices, pieces)
	total := 0.0
	for _, d := range devices {
		total += d.count
	}
	for i, l := range slices.Concat(devices, pieces) {
		p.right[i] = l.count/total + perturbation*(1+math.Mod(float64(i)*math.Phi, 1))
		slack := make([]float64, rows)
		slack[i] = 1
		p.columns = append(p.columns, slack)
		p.cost = append(p.cost, 0)
		p.basis = append(p.basis, i)
	}
	for d := range devices {
		for i, s := range pieces {
			if n := devices[d].units / s.units; n > 0 {
				cut := make([]float64, len(pieces))
				cut[i] = float64(n)
				p.add(d, cut)
			}
		}
	}
	return p
}

// stepOf is the unit in which sizes are counted: their greatest common divisor,
// or a part of the largest device if that is too fine.
func stepOf(largest accel.Units, lots ...[]lot) accel.Units {
	step := accel.Units(0)
	for _, list := range lots {
		for _, l := range list {
			for a, b := step, l.units; ; a, b = b, a%b {
				if b == 0 {
					step = a
					break
				}
			}
		}
	}
	return max(step, (largest-1)/maxSteps+1)
}

// add adds a way to cut a device of the d-th size.
func (p *program) add(d int, cut []float64) {
	column := make([]float64, len(p.right))
	column[d] = 1
	used := 0.0
	for i, n := range cut {
		column[len(p.devices)+i] = n
		used += n * float64(p.pieces[i].units) / float64(p.largest)
	}
	p.columns = append(p.columns, column)
	p.cost = append(p.cost, -used) // the solver minimizes
}

// solve solves the program with the ways that there are, and sets prices.
func (p *program) solve() error {
	rows := len(p.right)
	a := mat.NewDense(rows, len(p.columns), nil)
	for j, c := range p.columns {
		a.SetCol(j, c)
	}
	_, x, err := lp.Simplex(p.cost, a, p.right, 1e-10, p.basis)
	if err != nil {
		return err //nolint:wrapcheck // worth does
	}
	var basis []int
	for j, v := range x {
		if v > perturbation/1e4 {
			basis = append(basis, j)
		}
	}
	if len(basis) != rows {
		return errors.New("the solution is degenerate")
	}
	p.basis = basis
	// The prices are those at which each way of the basis is worth just what it
	// uses.
	b := mat.NewDense(rows, rows, nil)
	c := mat.NewVecDense(rows, nil)
	for i, j := range basis {
		b.SetCol(i, p.columns[j])
		c.SetVec(i, -p.cost[j])
	}
	var y mat.VecDense
	if err := y.SolveVec(b.T(), c); err != nil {
		return err //nolint:wrapcheck // worth does
	}
	for i := range p.prices {
		p.prices[i] = y.AtVec(i)
	}
	return nil
}

// gain is what a piece of the i-th size uses, less its price.
func (p *program) gain(i int) float64 {
	return float64(p.pieces[i].units)/float64(p.largest) - p.prices[len(p.devices)+i]
}

// improve adds, per size of devices, the way to cut that is worth most more than
// the device's price, and reports whether there was one.
func (p *program) improve() bool {
	gains := make([]float64, len(p.pieces))
	for i := range gains {
		gains[i] = p.gain(i)
	}
	_, choice, best := fill(p.largest, p.step, p.pieces, gains)
	improved := false
	for d := range p.devices {
		at := int(p.devices[d].units / p.step)
		if best[at] <= p.prices[d]+perturbation {
			continue
		}
		cut := make([]float64, len(p.pieces))
		for at > 0 {
			i := choice[at]
			if i < 0 {
				at--
				continue
			}
			cut[i]++
			at -= steps(p.pieces[i].units, p.step)
		}
		p.add(d, cut)
		improved = true
	}
	return improved
}

// steps is how many steps a piece takes, rounded up.
func steps(units, step accel.Units) int { return int((units-1)/step + 1) }

// fill says how to fill 0, 1, ... steps of a device with pieces so that the sum
// of their values is greatest: that sum, and the last piece of the way to it, -1
// for a step that stays free.
func fill(device, step accel.Units, pieces []lot, values []float64) (n int, choice []int, best []float64) {
	n = int(device / step)
	choice, best = make([]int, n+1), make([]float64, n+1)
	for x := 1; x <= n; x++ {
		best[x], choice[x] = best[x-1], -1
		for i, s := range pieces {
			w := steps(s.units, step)
			if w > x {
				break // they ascend
			}
			if v := best[x-w] + values[i]; v > best[x]+1e-9 {
				best[x], choice[x] = v, i
			}
		}
	}
	return n, choice, best
}

// table says what the free units of a device are good for: pieces as they
// usually come, and as many as come, in the best mixture.
type table struct {
	total accel.Units
	step  accel.Units
	// useful has, per step, what so many free units are good for, in the scale
	// of value.
	useful []int64
}

// newTable makes the table of devices of a size, scaled so that an empty device
// is good for all that it has. Without pieces all free units are as good.
func newTable(total accel.Units, pieces []lot, worth []float64, s scale) table {
	largest := 0
	for largest < len(pieces) && pieces[largest].units <= total {
		largest++
	}
	pieces, worth = pieces[:largest], worth[:largest]
	t := table{total: total, step: stepOf(total, []lot{{units: total}}, pieces)}
	n, _, best := fill(total, t.step, pieces, worth)
	top := best[n]
	if top <= 0 {
		t.step = stepOf(total)
		n = int(total / t.step)
	}
	t.useful = make([]int64, n+1)
	for x := range t.useful {
		if top > 0 {
			t.useful[x] = int64(math.Round(best[x] / top * float64(s.value(total))))
		} else {
			t.useful[x] = s.value(accel.Units(x) * t.step)
		}
	}
	t.useful[n] = s.value(total)
	return t
}

// of returns what a device with so many free units is good for.
func (t *table) of(free accel.Units) int64 {
	if free >= t.total {
		return t.useful[len(t.useful)-1]
	}
	return t.useful[max(free, 0)/t.step]
}

// lots sums up counts by size and keeps the sizes that matter most; pieces of the
// others count as those of the next larger size, or else of the largest.
func lots(counts map[accel.Units]float64, most int) []lot {
	var all []lot
	for u, n := range counts {
		if u > 0 && n > 0 {
			all = append(all, lot{u, n})
		}
	}
	slices.SortFunc(all, func(a, b lot) int {
		return cmp.Or(cmp.Compare(float64(b.units)*b.count, float64(a.units)*a.count), cmp.Compare(a.units, b.units))
	})
	kept := slices.Clone(all[:min(most, len(all))])
	slices.SortFunc(kept, func(a, b lot) int { return cmp.Compare(a.units, b.units) })
	for _, l := range all[len(kept):] {
		i, _ := slices.BinarySearchFunc(kept, l.units, func(a lot, u accel.Units) int { return cmp.Compare(a.units, u) })
		kept[min(i, len(kept)-1)].count += l.count
	}
	return kept
}
